"""Errors in ulp: what correct rounding leaves, what a kernel that is off has, and what does not
count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import SAMPLED, ulps

FORMATS = ("float16", "bfloat16", "float32")


def measured(got: Tensor, want: Tensor, dtype: str, bound: float = 1.0) -> dict[str, float]:
    truth = want, torch.full_like(want, bound)
    rows = torch.ones(want.shape[:-1], dtype=torch.bool)
    return ulps("out", (got.double() - want).abs(), truth, rows, dtype_named(dtype))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 3e3])
def test_a_correctly_rounded_result_is_the_best_and_within_half_an_ulp(
    dtype: str, scale: float
) -> None:
    want = scale * normal(2, 3, 17, 64)
    found = measured(want.to(getattr(torch, dtype)), want, dtype)
    assert (found["ulp50_out"], found["ulp99_out"]) == (found["best50_out"], found["best99_out"])
    assert 0.05 < found["best50_out"] < 0.25 < found["best99_out"] <= 0.5


@pytest.mark.parametrize("dtype", FORMATS)
def test_an_error_of_three_ulp_of_the_row_is_three(dtype: str) -> None:
    want = torch.ones(1, 2, 5, 16, dtype=torch.float64)
    ulp = 2.0 ** (1 - dtype_named(dtype).precision)
    found = measured(want + 3 * ulp, want, dtype)
    assert (found["ulp50_out"], found["ulp99_out"], found["best99_out"]) == (3.0, 3.0, 0.0)


def test_elements_that_cancel_are_measured_by_their_row() -> None:
    want = torch.ones(1, 1, 4, 16, dtype=torch.float64)
    want[..., 0] = 2.0**-30
    found = measured(want + 2.0**-10, want, "float16")
    assert found["ulp99_out"] == 2.0  # 0.96 is the root mean square: an ulp of 2^-11


def test_subnormal_outputs_have_the_spacing_of_subnormals() -> None:
    want = torch.full((1, 1, 4, 16), 2.0**-22, dtype=torch.float64)
    assert measured(want + 2.0**-24, want, "float16")["ulp50_out"] == 1.0
    assert measured(want * 0 + 2.0**-24, want * 0, "float16")["ulp50_out"] == 1.0


def test_nan_is_infinitely_far_off_and_what_nobody_asks_for_does_not_count() -> None:
    want = torch.ones(1, 1, 50, 16, dtype=torch.float64)
    got = want.clone()
    got[0, 0, :2] = math.nan
    found = measured(got, want, "float16")
    assert (found["ulp50_out"], found["ulp99_out"]) == (0.0, math.inf)
    truth = want, torch.where(got.isnan(), torch.inf, 1.0)
    rows = torch.ones(1, 1, 50, dtype=torch.bool)
    error = (got - want).abs()
    assert ulps("out", error, truth, rows, dtype_named("float16"))["ulp99_out"] == 0.0
    rows[:, :, :2] = False
    truth = want, torch.ones_like(want)
    assert ulps("out", error, truth, rows, dtype_named("float16"))["ulp99_out"] == 0.0
    assert ulps("out", error, truth, rows & False, dtype_named("float16")) == {}


@pytest.mark.parametrize("queries", [1, 64, 63])
def test_large_tensors_are_sampled_over_all_their_rows(queries: int) -> None:
    want = normal(2 * SAMPLED // queries // 16, 8, queries, 16)
    whole = measured(want.to(torch.bfloat16), want, "bfloat16")
    assert whole["ulp50_out"] == pytest.approx(0.118, abs=0.01)
    worst = want.clone()
    worst[:, :, ::2] += 1.0  # of every second query
    found = measured(worst, want, "bfloat16")
    assert found["ulp99_out"] > 50
