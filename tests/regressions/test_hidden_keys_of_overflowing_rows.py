"""Rows whose scores the declared arithmetic does not hold: a finite stand-in for masked scores
outweighs -inf, and hidden keys show."""

from __future__ import annotations

import pytest
import torch

from references.masks import Causal
from tests.harness.eager import Eager, eager
from tests.harness.fake_trials import acquitted, convicted
from tests.regressions.cases import SQUARE
from verify.judging.metamorphic import beyond_arithmetic
from verify.oracles import (
    causality,
    poison,
)
from verify.problem import Problem

torch.set_num_threads(1)


@pytest.mark.parametrize("oracle", [causality.FORWARD, poison.FORWARD], ids=["causality", "poison"])
def test_hidden_keys_may_show_in_rows_whose_scores_overflow(oracle) -> None:
    below = Problem(**(SQUARE | {"head_dim": 128}), distribution="below_sentinel", mask=Causal())
    for seed in range(4):
        trial = eager(Eager(), below.but(seed=seed))
        assert bool(beyond_arithmetic(trial).any())
        assert acquitted(oracle.judge(trial))
        ordinary = below.but(seed=seed, distribution="normal")
        assert acquitted(oracle.judge(eager(Eager(), ordinary)))
        assert not bool(beyond_arithmetic(eager(Eager(), ordinary)).any())
        convicted(oracle.judge(eager(Eager(hidden=-4.0), ordinary)), "out[b=0")
