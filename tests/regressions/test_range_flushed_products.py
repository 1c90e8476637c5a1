"""Products that fp32 flushes are ordinary scores under a huge scale, and partial gradients are
flushed under a tiny one."""

from __future__ import annotations

import pytest
import torch

from tests.harness.backward_inputs import Inputs
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulated_steps import TINY, Kernel
from tests.harness.emulation_backward import BackwardKernel
from tests.harness.range_edges import errors, filled, gradient_errors, run, truth
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")
FLUSHED = Kernel(
    "products that flush",
    flat_numerics(operands="float32", probability="float32", exp="expf", block_n=16),
)
BACKWARD = BackwardKernel(
    "its backward",
    flat_gradients(
        operands="float32",
        probability="float32",
        score_gradient_dtype="float32",
        exp="expf",
        block_m=0,
        block_n=4,
    ),
    FLUSHED,
    natural=True,
)


def small(exponent: int) -> Problem:
    return Problem(
        seqlen_q=6, seqlen_kv=16, head_dim=16, dtype="bfloat16", softmax_scale=2.0**exponent, seed=5
    )


@pytest.mark.parametrize("exponent", [110, 118, 125])
def test_scores_of_flushed_products(exponent: int) -> None:
    problem = small(exponent)
    given = filled(
        problem,
        q=2.0**-60,
        k=2.0**-66 * torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(1)),
    )
    found = run(problem, FLUSHED, given, TINY)
    ratio = errors(problem, FLUSHED, given, found)
    assert ratio.worst <= 1
    limits = truth(problem, FLUSHED, given)
    assert bool(limits.lse_bound.isfinite().all())
    if exponent == 118:  # it really strays
        assert float((found.lse.double() - limits.lse).abs().max()) > 1e-3


def larger(problem: Problem) -> Inputs:
    """Products that are normal numbers of fp32."""
    keys = 2.0**-56 * (1 + torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(1)))
    return filled(problem, q=2.0**-60, k=keys)


def test_what_flushes_normal_numbers_is_convicted() -> None:
    problem = small(118)
    given = larger(problem)
    for least, right in ((TINY, True), (2.0**-112, False)):
        assert (
            errors(problem, FLUSHED, given, run(problem, FLUSHED, given, least)).worst <= 1
        ) is right
    saved = run(problem, FLUSHED, given)
    for least, right in ((TINY, True), (2.0**-112, False)):
        assert (max(gradient_errors(problem, BACKWARD, given, saved, least).values()) <= 1) is right


@pytest.mark.parametrize("exponent", [110, 120])
def test_gradients_of_flushed_products(exponent: int) -> None:
    problem = small(exponent)
    given = filled(
        problem,
        q=2.0**-60,
        k=2.0**-66 * torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(1)),
    )
    saved = run(problem, FLUSHED, given)
    assert max(gradient_errors(problem, BACKWARD, given, saved, TINY).values()) <= 1


def test_no_product_no_flush() -> None:
    """Q = 0: nothing is flushed, and the bound knows."""
    problem = small(125)
    limits = [
        truth(p, FLUSHED, filled(p, q=0.0)) for p in (problem, problem.but(softmax_scale=1.0))
    ]
    assert torch.equal(limits[0].lse_bound, limits[1].lse_bound)
    assert torch.equal(limits[0].out_bound, limits[1].out_bound)
