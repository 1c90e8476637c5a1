"""Scores of integers are exact unless Q was multiplied by something that is no power of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.declared import flat_numerics, with_fields
from tests.harness.fake_trials import acquitted, convicted, trial_of
from tests.harness.reference_kernel import LOG2_E, Hand, faulty, tried_by
from tests.regressions.cases import SHAPE
from verify.oracles import (
    bound,
    integer_scores,
)
from verify.problem import Problem

torch.set_num_threads(1)


INTEGERS = Problem(**SHAPE, seed=5, distribution="integer_scores")


BASE_2, BASE_E = ("ex2.approx", "exp2f", "exp2_poly3"), ("expf", "vexp", "fexp_u20")


@pytest.mark.parametrize("exp", [*BASE_2, *BASE_E])
def test_scores_are_exact_where_operands_are_multiplied_by_a_power_of_two(exp: str) -> None:
    powers_of_2_and_4 = {
        0.25: (True, True),
        -0.25: (True, True),
        0.125: (True, False),
        0.3: (False, False),
    }
    for scale, powers in powers_of_2_and_4.items():
        for prescale, exact in (("none", True), *zip(("q", "sqrt"), powers, strict=True)):
            trial = trial_of(
                INTEGERS.but(softmax_scale=scale),
                numerics=flat_numerics(prescale=prescale, exp=exp),
            )
            assert integer_scores.ORACLE.concerns(trial) is (
                exact and (prescale == "none" or exp in BASE_E)
            )


def folded(name: str, x: Tensor) -> Tensor:
    """Q times scale * log2 e, rounded to bf16; divided again, since `Hand` multiplies the
    scores."""
    factor = 0.25 * LOG2_E
    return (x * factor).bfloat16().float() / factor if name == "q" else x


def test_log2_e_in_q_is_honest_and_leaves_no_exact_scores() -> None:
    case, numerics = (
        INTEGERS.but(softmax_scale=0.25, dtype="bfloat16"),
        flat_numerics(prescale="q", scale_roundings=3),
    )
    trial = tried_by(faulty(load=folded), case, numerics=numerics)
    assert acquitted(bound.judge(trial))
    assert not integer_scores.ORACLE.concerns(trial)
    convicted(integer_scores.judge(trial), "lse is off by")  # what it would say if it were asked
    for hand, right in ((Hand(), True), (faulty(scores=lambda x: x.half().float()), False)):
        trial = tried_by(hand, case, numerics=with_fields(numerics, exp="expf"))
        assert integer_scores.ORACLE.concerns(trial)
        assert acquitted(integer_scores.judge(trial)) is right
