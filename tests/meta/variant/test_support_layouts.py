"""Support.check and check_backward on tensors that lie as no Problem can: head_dim not innermost,
or a single column."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Full
from verify.variant import AttentionArgs, Config, Gradients, Saved, Support, Unsupported


def columns_first(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape).mT.contiguous().mT


@pytest.mark.parametrize("layouts", ["any", "aligned", "contiguous"])
def test_a_head_dim_that_is_not_innermost_is_refused(layouts: str) -> None:
    shape = 2, 2, 16, 64
    q, k, v, out = (torch.zeros(shape) for _ in range(4))
    args = AttentionArgs(q, k, v, mask=Full(), softmax_scale=0.125, score_mod=None, config=Config())
    support = Support(dtypes=("float32",), head_dims=(64,), layouts=layouts)
    support.check(args, out)
    with pytest.raises(Unsupported, match="head_dim must be innermost") as refusal:
        support.check(replace(args, k=columns_first(shape)), out)
    assert refusal.value.argument == "layout_k"

    saved = Saved(out, torch.zeros(shape[:3]))
    support.check_backward(args, saved, out, Gradients(q, k, v))
    with pytest.raises(Unsupported, match="head_dim must be innermost") as refusal:
        support.check_backward(args, saved, out, Gradients(q, k, columns_first(shape)))
    assert refusal.value.argument == "layout_dv"
    with pytest.raises(Unsupported) as refusal:
        support.check_backward(args, saved, columns_first(shape), Gradients(q, k, v))
    assert refusal.value.argument == "layout_dout"


def test_a_single_column_is_innermost_whatever_its_stride() -> None:
    column = torch.zeros(32).as_strided((1, 1, 4, 1), (8, 8, 2, 2))
    args = AttentionArgs(
        column, column, column, mask=Full(), softmax_scale=1.0, score_mod=None, config=Config()
    )
    Support(dtypes=("float32",), head_dims=(1,)).check(args, column)
