"""Counting, where exp(0) is not 1: every rescale multiplies what came before by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from references.masks import Window
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, acquitted, convicted, right_run, trial_of
from tests.harness.reference_kernel import Hand, faulty, tried_by
from tests.regressions.cases import COUNTED
from verify.judging.launch import Launch
from verify.oracles import (
    bound,
    counting,
)

torch.set_num_threads(1)


def off_by(error: float) -> Hand:
    """A kernel whose exponentials, those of rescales included, are that far off."""
    return faulty(exp2=lambda x: torch.exp2(x) * (1 + error))


@pytest.mark.parametrize("error", [1.12e-4, -1.12e-4, -5e-5])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_exponential_of_0_within_its_error_is_no_miscount(dtype: str, error: float) -> None:
    case = COUNTED.but(dtype=dtype, seqlen_kv=400)
    trial = tried_by(off_by(error), case, numerics=flat_numerics(exp="fexp_u20"))
    assert float((trial.first.outputs["lse"] - math.log(400)).abs()[..., -1].min()) > 3 * abs(
        error
    ), "13 blocks"
    assert acquitted(counting.judge(trial))
    assert acquitted(bound.judge(trial))
    convicted(
        counting.judge(tried_by(off_by(1e-3), case, numerics=flat_numerics(exp="fexp_u20"))),
        "counts",
    )


@pytest.mark.parametrize("exp", ["ex2.approx", "fexp_u20"])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_key_too_many_is_a_miscount_all_the_same(name: str, exp: str) -> None:
    trial = tried_by(off_by(0.0), COUNTED, numerics=flat_numerics(exp=exp))
    other = tried_by(off_by(0.0), COUNTED.but(mask=Window(None, 1)))
    assert acquitted(counting.judge(trial))
    trial.launches["first"] = replace(
        trial.first, outputs=trial.first.outputs | {name: other.first.outputs[name]}
    )
    assert convicted(counting.judge(trial), "miscount").where.startswith(f"{name}[")


@pytest.mark.parametrize("exp", ["ex2.approx", "__expf"])
def test_blocks_leave_no_room_where_exp_0_is_known_to_be_1(exp: str) -> None:
    drift = tried_by(
        off_by(2 * 2.0**-23),
        COUNTED.but(seqlen_kv=2048, dtype="float32"),
        numerics=flat_numerics(exp=exp),
    )
    for arch in ("cpu", "sm_80", "sm_90"):
        drift.arch = arch
        if exp == "__expf":
            assert acquitted(counting.judge(drift))
        else:
            convicted(counting.judge(drift), "miscount")


@pytest.mark.parametrize("exp", ["__expf", "ex2.approx.f16", "ex2.approx.ftz.bf16"])
def test_counting_takes_exponentials_whose_error_is_not_one_number(exp: str) -> None:
    case, numerics = COUNTED.but(seqlen_kv=40, heads_q=2), flat_numerics(exp=exp, block_n=16)
    for luck in Luck:
        trial, result = (
            trial_of(case, numerics=numerics),
            emulate(case, Kernel("honest", numerics, arch="cpu"), luck),
        )
        trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
        assert acquitted(counting.judge(trial))
    trial.launches["first"] = right_run(trial_of(case.but(mask=Window(2, 0))))
    convicted(counting.judge(trial), "miscount")
