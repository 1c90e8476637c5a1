"""Scores that fp32 holds, and not times log2(e): kernels in base 2 make NaN of them."""

from __future__ import annotations

import math

import pytest

from tests.harness.backward_inputs import exact
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Result
from tests.harness.emulation_backward import BackwardKernel
from tests.harness.range_edges import errors, filled, gradient_bounds, gradient_errors, run, truth
from verify.problem import Problem, ProblemError

pytestmark = pytest.mark.usefixtures("one_thread")
FUSED = Kernel("fused", flat_numerics(block_n=16, scale_roundings=3), style="fused")
ONLINE = Kernel("online", flat_numerics(block_n=16))
BACKWARD = BackwardKernel("base 2", flat_gradients(block_m=0, block_n=0), ONLINE)
ONE_KEY = Problem(
    seqlen_q=3, seqlen_kv=1, head_dim=1, head_dim_v=4, dtype="bfloat16", softmax_scale=1.0, seed=1
)


@pytest.mark.parametrize("kernel", [FUSED, ONLINE], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("scale", [1.0, 0.75, 2.0**100])
def test_one_key_of_nearly_fp32_s_largest_number(kernel: Kernel, scale: float) -> None:
    problem = ONE_KEY.but(softmax_scale=scale)
    given = filled(problem, q=2.4e38 / scale, k=1.0)
    found = run(problem, kernel, given)
    assert not bool(found.lse.isfinite().any())
    assert errors(problem, kernel, given, found).worst <= 1


def test_far_below_that_a_fault_is_seen() -> None:
    """In between a fused exponent may overflow."""
    given = filled(ONE_KEY, q=2.0**24, k=1.0)
    right = run(ONE_KEY, ONLINE, given)
    limits = truth(ONE_KEY, ONLINE, given)
    assert bool(limits.lse_bound.isfinite().all())
    assert errors(ONE_KEY, ONLINE, given, right).worst <= 1
    wrong = Result(right.out, right.lse * 1.001)
    assert errors(ONE_KEY, ONLINE, given, wrong).worst > 1


def test_an_lse_that_base_2_does_not_hold() -> None:
    given = filled(ONE_KEY, q=2.4e38, k=1.0)
    saved = exact(ONE_KEY, given)
    assert bool((saved.lse * math.log2(math.e) > 3.4e38).all())
    assert max(gradient_errors(ONE_KEY, BACKWARD, given, saved).values()) <= 1
    below = filled(ONE_KEY, q=2.0**40, k=1.0)
    assert (
        bool(
            gradient_bounds(ONE_KEY, BACKWARD, below, exact(ONE_KEY, below))
            .dv_bound.isfinite()
            .any()
        )
        is False
    )
    plain = filled(ONE_KEY, q=2.0**10, k=1.0)
    assert bool(
        gradient_bounds(ONE_KEY, BACKWARD, plain, exact(ONE_KEY, plain)).dv_bound.isfinite().all()
    )


def test_a_scale_that_fp32_does_not_hold_is_no_problem_of_a_kernel() -> None:
    with pytest.raises(ProblemError, match=r"softmax_scale: 1e\+39 is above fp32's largest number"):
        ONE_KEY.but(softmax_scale=1e39)
