"""The oracles on 8-bit inputs with descales: exact results pass, a factor of the wrong head or one
forgotten is convicted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Full, Lengths
from references.quantisation import Unquantised, parse_quantisation
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import SHAPE, acquitted, convicted, tried
from verify.judging.trial import Trial
from verify.oracles import bound, counting, gather, poison
from verify.problem import Problem
from verify.problem.inputs import dequantised, stored_factors, tensors
from verify.variant import DESCALINGS

torch.set_num_threads(1)

FP8 = flat_numerics(probability_scale=256.0, output_roundings=1, scale_roundings=3)
MASKS = (Full(), Causal(), Lengths((6, 2), (9, 3)))


def quantised(distribution: str = "normal", descaling: str = "head", **changes: object) -> Problem:
    return Problem(
        **SHAPE,
        dtype="float8_e4m3fn",
        quantisation=parse_quantisation(descaling),
        distribution=distribution,
        seed=5,
    ).but(**changes)


@pytest.mark.parametrize("descaling", DESCALINGS)
def test_exact_results_pass(descaling: str) -> None:
    for mask in MASKS:
        for oracle, distribution in (
            (bound.FORWARD, "normal"),
            (counting.ORACLE, "counting"),
            (gather.FORWARD, "gather"),
        ):
            trial = tried(quantised(distribution, descaling, mask=mask), numerics=FP8)
            assert acquitted(oracle.judge(trial)), (oracle.name, mask.name)


def test_a_descale_of_v_forgotten_or_of_another_head_is_convicted() -> None:
    factor = stored_factors(quantised("gather"))["descale_v"].repeat_interleave(2, 1)[
        ..., None, None
    ]
    assert len(set(factor.flatten().tolist())) > 1

    def forgotten(out: Tensor, lse: Tensor) -> None:
        out.copy_(out.float() / factor)

    def another(out: Tensor, lse: Tensor) -> None:
        out.copy_(out.float() / factor * factor.roll(2, 1))

    for plant in (forgotten, another):
        convicted(gather.judge(tried(quantised("gather"), plant, numerics=FP8)), "rows are wrong")
        convicted(bound.judge(tried(quantised(), plant, numerics=FP8)), "out is off by")


def test_a_descale_of_q_or_k_shows_in_the_lse() -> None:
    """Those of an exact problem cancel per head, so that a factor left out moves every winning
    logit."""
    problem = quantised("gather")
    factors = stored_factors(problem)
    assert bool((factors["descale_q"] * factors["descale_k"] == 1).all())
    assert bool((factors["descale_q"] != 1).any())
    k = factors["descale_k"].repeat_interleave(2, 1)[..., None]
    convicted(
        gather.judge(tried(problem, lambda out, lse: lse.div_(k), numerics=FP8)),
        "should be the winning logit",
    )


def test_the_reference_sees_what_the_factors_make_of_the_inputs() -> None:
    problem = quantised()
    inputs = tensors(problem)
    q, _, _ = dequantised(problem, inputs)
    factor = inputs.others["descale_q"].double().repeat_interleave(2, 1)[..., None, None]
    assert torch.equal(q, inputs.q.double() * factor)
    assert all(
        tensor.dtype == torch.float64
        for tensor in dequantised(problem.but(quantisation=Unquantised()), tensors(problem))
    )


@pytest.mark.parametrize("masked_values", ["any", "finite"])
def test_poison_reaches_masked_bytes(masked_values: str) -> None:
    from verify.variant import Contract

    trial: Trial = tried(quantised(mask=MASKS[2]), contract=Contract(masked_values=masked_values))
    found = poison.poisoned(trial)
    assert found.count > 0
    spoiled = found.inputs.v.double()[1, :, 3:]
    assert bool((spoiled.isnan() if masked_values == "any" else spoiled == 448.0).all())
