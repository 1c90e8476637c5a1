"""A key that must not show is no larger than fp16 scores hold: infinities may spread from there."""

from __future__ import annotations

import math

import torch

from references.masks import Causal
from tests.harness.eager import Eager, eager
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import Kernel, declared
from tests.harness.in_process import trial as asked
from tests.regressions.cases import SQUARE
from verify.oracles import (
    poison,
)
from verify.problem import Problem

torch.set_num_threads(1)


INF = math.inf


def test_a_key_that_must_not_show_is_no_larger_than_fp16_scores_hold() -> None:
    """+inf + -inf is NaN, and infinities may spread from a masked place."""
    for distribution in ("normal", "increasing"):
        for seed in range(4):
            case = Problem(
                **(SQUARE | {"head_dim": 128}), distribution=distribution, mask=Causal(), seed=seed
            )
            assert acquitted(poison.judge(eager(Eager(hidden=-INF, added=True), case)))
    case = Problem(**SQUARE, mask=Causal(), seed=1)
    convicted(poison.judge(eager(Eager(hidden=-30.0, added=True), case)), "huge values")
    assert float(poison.poisoned(eager(Eager(), case)).inputs.k.abs().max()) < 2.0**14
    wide = asked(Kernel(), case, declared(score_mods=()))
    assert float(poison.poisoned(wide).inputs.k.abs().max()) == 2.0**14, "scores in fp32"
