"""IEEE 754 leaves a NaN's sign and payload open, and CPUs give one or another by the place in a
vector."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.fake_trials import PLAIN, acquitted, convicted, tried
from verify.cell.arena import bits, different
from verify.judging.metamorphic import check_same_bits
from verify.judging.trial import Trial
from verify.oracles import (
    repeat,
)

torch.set_num_threads(1)


NAN = math.nan


def another_nan(dtype: torch.dtype) -> Tensor:
    """The negative of the usual one, with a payload."""
    return (
        -bits(torch.tensor([1.0], dtype=dtype)) | bits(torch.tensor([NAN], dtype=dtype)) | 1
    ).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_nan_is_like_any_other(dtype: torch.dtype) -> None:
    one, other = (
        torch.tensor([NAN, NAN, 1.0, 0.0], dtype=dtype),
        torch.tensor([0.0, NAN, 1.0, -0.0], dtype=dtype),
    )
    other[0] = another_nan(dtype)[0]
    assert bits(one)[0] != bits(other)[0]
    assert different(one, other).tolist() == [False, False, False, True]
    assert acquitted(check_same_bits("slice", "alone", [("out", one, other)]))
    convicted(
        check_same_bits("slice", "alone", [("out", one, other.nan_to_num(2.0))]), "2 of 4 elements"
    )


def test_runs_that_differ_in_kinds_of_nan_repeat() -> None:
    def again(value: Tensor) -> Trial:
        trial = tried(PLAIN.but(dtype="float16"), lambda out, lse: out[0, 0, 0, :2].fill_(NAN))
        out = trial.first.outputs["out"].clone()
        out[0, 0, 0, 1] = value[0]
        trial.launches["again"] = replace(trial.first, outputs=trial.first.outputs | {"out": out})
        return trial

    assert acquitted(repeat.ORACLES[0].judge(again(another_nan(torch.float16))))
    convicted(repeat.ORACLES[0].judge(again(torch.tensor([1.0]))), "out[b=0, h=0, q=0, d=1]")
