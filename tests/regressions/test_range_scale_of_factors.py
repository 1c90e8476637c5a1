"""A scale that overflows when the factors of Q and K multiply it: a product of 0 is NaN then.

An honest kernel of 8-bit inputs multiplies each product by one number, scale log2 e d_Q d_K, in
fp32.  The row was judged as if that were finite wherever scale log2 e is.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.triton.fp8_forward import VARIANT
from verify.judging.invariants import ForwardSlack, forward_slack, reach
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, stored_factors, tensors
from verify.tolerance.forward import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
FOUND = Problem.parse(
    "b=2,sq=1,skv=1,d=16,dtype=float8_e4m3fn,scale=8.507059173023462e+37,lv=transposedv,"
    "descale=head,dist=small_integers"
)


# The same, and Q is 0: by the norms of Q and K no score is large.  O was no average of V.
NO_AVERAGE = Problem.parse(
    "sq=1,skv=1,d=16,dtype=float8_e4m3fn,scale=8.507059173023462e+37,descale=tensor,"
    "dist=negative_lse,seed=176"
)


def truth(problem: Problem) -> Truth:
    arithmetic = resolve(VARIANT.numerics, VARIANT.configs[0], problem, "sm_90")
    return compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])


def slack(problem: Problem) -> ForwardSlack:
    arithmetic = resolve(VARIANT.numerics, VARIANT.configs[0], problem, "cpu")
    q, k, v = dequantised(problem, tensors(problem))
    return forward_slack(problem, arithmetic, reach(problem, q, k), (q, k, v))


def multiplied(problem: Problem) -> torch.Tensor:
    """What the kernel multiplies the products of each sequence by, in fp32."""
    factors = stored_factors(problem)
    scale = torch.tensor(problem.scale * math.log2(math.e), dtype=torch.float32)
    return (scale * factors["descale_q"] * factors["descale_k"]).flatten()


def test_where_the_factor_overflows_no_number_is_wrong() -> None:
    factor = multiplied(FOUND)
    assert math.isfinite(FOUND.scale * math.log2(math.e))
    assert factor.isinf().any(), "the kernel's own factor"
    assert (0.0 * factor).isnan().any()
    assert bool(truth(FOUND).out_bound.isinf().all())


def test_where_the_factor_overflows_no_slack_covers_a_row() -> None:
    assert multiplied(NO_AVERAGE).isinf().all(), "the kernel's own factor"
    assert bool(slack(NO_AVERAGE).beyond.all())
    finite = NO_AVERAGE.but(softmax_scale=2.0**120)
    assert multiplied(finite).isfinite().all()
    assert not slack(finite).beyond.any()


@pytest.mark.parametrize("change", [{"softmax_scale": 2.0**120}, {"softmax_scale": 0.25}])
def test_where_it_is_finite_the_bound_is(change: dict[str, float]) -> None:
    problem = FOUND.but(**change)
    assert bool(multiplied(problem).isfinite().all())
    assert bool(truth(problem).out_bound.isfinite().all())
