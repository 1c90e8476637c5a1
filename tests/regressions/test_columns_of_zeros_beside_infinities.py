"""An infinite score makes NaN of a column of zeros, which otherwise must stay exactly 0."""

from __future__ import annotations

import torch

from tests.harness.eager import Eager, eager
from tests.harness.fake_trials import acquitted, convicted
from tests.regressions.cases import SQUARE
from verify.judging.findings import first, place
from verify.judging.metamorphic import beyond_arithmetic
from verify.oracles import (
    bound,
)
from verify.problem import Problem

torch.set_num_threads(1)


def test_an_infinite_score_makes_no_zero_of_a_column_of_zeros() -> None:
    """inf - inf is NaN, and so is its product with 0; where scores are finite the column stays
    exactly 0."""
    zeros = 0
    for seed in range(6):
        case = Problem(
            **(SQUARE | {"seqlen_kv": 2}),
            distribution="small_integers",
            softmax_scale=1e5,
            seed=seed,
        )
        trial = eager(Eager(), case)
        beyond, column = (
            beyond_arithmetic(trial),
            (trial.truth.out_bound == 0) & (trial.truth.out == 0),
        )
        assert not bool(column[beyond].any())
        zeros += int((~beyond[..., None] & column).sum())
        assert acquitted(bound.judge(trial))
        assert bool(trial.first.outputs["out"].isnan().any())
        at = first(~beyond[..., None] & column)
        trial.first.outputs["out"][at] = 1e-7
        convicted(bound.judge(trial), place("out", at))
    assert zeros
