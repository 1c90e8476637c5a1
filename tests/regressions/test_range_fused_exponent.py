"""An exponent by one fma is off by what its product of maximum and scale was rounded by: P of large
scores overflows."""

from __future__ import annotations

import pytest
import torch

from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Result
from tests.harness.emulation_backward import BackwardKernel
from tests.harness.range_edges import errors, filled, gradient_bounds, gradient_errors, run, truth
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")
FUSED = Kernel(
    "as FlashAttention-2 writes it", flat_numerics(block_n=32, scale_roundings=3), style="fused"
)
BACKWARD = BackwardKernel(
    "its backward", flat_gradients(scale_roundings=3, block_m=0, block_n=0), FUSED
)
CASE = Problem(seqlen_q=12, seqlen_kv=40, head_dim=16, dtype="float16", softmax_scale=1.0, seed=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e8, 1e9])
def test_random_inputs_under_a_huge_scale(dtype: str, scale: float) -> None:
    problem = CASE.but(dtype=dtype, softmax_scale=scale)
    given = filled(problem)
    found = run(problem, FUSED, given)
    assert errors(problem, FUSED, given, found).worst <= 1
    if scale == 1e9:
        assert not bool(found.out.isfinite().all())


# |S| = 16 size^2: what fl(m sigma) is off by is up to 2^(exponent - 25) in base 2.
@pytest.mark.parametrize(
    ("size", "narrow"), [(4096.0 * 1.43, True), (2.0**14.1, False), (2.0**15.3, False)]
)
def test_equal_keys_and_columns_of_zeros(size: float, narrow: bool) -> None:
    """P of 65520 is infinite in fp16, and infinity times 0 is NaN; in bf16 P overflows with fp32
    alone."""
    for dtype in ("float16", "bfloat16"):
        problem = CASE.but(dtype=dtype)
        rows = torch.linspace(0.9, 1.0, 12)[:, None] * size
        given = filled(problem, q=rows, k=size)
        found = run(problem, FUSED, given)
        ratio = errors(problem, FUSED, given, found)
        assert ratio.worst <= 1
        if not narrow:
            assert not bool(found.out[..., 0].isfinite().all())


def test_only_what_may_overflow_is_not_asked() -> None:
    """Rows of scores from 2^24 to 2^33: the bounds of the small ones stay finite, and a fault is
    seen there."""
    sizes = torch.tensor([2.0**n for n in (20, 22, 24, 25, 26, 27, 29, 30, 31, 32, 33, 34)])[
        :, None
    ]
    problem = CASE.but(dtype="bfloat16")
    given = filled(problem, q=sizes / 16, k=1.0)
    limits = truth(problem, FUSED, given)
    asked = limits.out_bound.isfinite().all(-1).flatten().tolist()
    assert asked == [True] * sum(asked) + [False] * (12 - sum(asked))
    assert 6 <= sum(asked) <= 9
    right = run(problem, FUSED, given)
    assert errors(problem, FUSED, given, right).worst <= 1
    wrong = Result(right.out.clone(), right.lse.clone())
    wrong.out[0, 0, sum(asked) - 1, 0] = 100.0
    assert float(errors(problem, FUSED, given, wrong).out[0, 0, sum(asked) - 1].max()) > 1
    wrong = Result(right.out, right.lse + 64.0)
    assert float(errors(problem, FUSED, given, wrong).lse[0, 0, 0]) > 1


def test_weights_that_may_all_vanish_leave_no_row_sum() -> None:
    """Where every p~ is 2^-150 at most, O is 0 over 0."""
    problem = CASE.but(dtype="bfloat16", seqlen_kv=1)
    given = filled(problem, q=torch.linspace(2.0**31, 2.0**33, 12)[:, None], k=1.0)
    found = run(problem, FUSED, given)
    assert bool(found.lse.isinf().any())
    assert errors(problem, FUSED, given, found).worst <= 1


def test_rows_without_large_scores_keep_their_bits() -> None:
    problem = CASE.but(softmax_scale=0.25)
    limits = truth(problem, FUSED, filled(problem))
    assert bool(limits.out_bound[..., 1:].isfinite().all())
    assert not limits.out_bound[..., 0].any()


def test_the_backward() -> None:
    for dtype, scale in (("float16", 1e9), ("bfloat16", 1e9), ("bfloat16", 1e8)):
        problem = CASE.but(dtype=dtype, softmax_scale=scale)
        given = filled(problem)
        saved = run(problem, FUSED, given)
        assert max(gradient_errors(problem, BACKWARD, given, saved).values()) <= 1
    plain = CASE.but(softmax_scale=0.25)
    given = filled(plain)
    saved = run(plain, FUSED, given)
    assert bool(gradient_bounds(plain, BACKWARD, given, saved).dq_bound.isfinite().all())
