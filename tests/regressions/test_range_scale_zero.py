"""A scale of 0 makes NaN of raw scores that overflow, and an additive mask of -inf of masked
ones."""

from __future__ import annotations

import pytest
import torch

from references.masks import Causal, Full
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Result
from tests.harness.emulation_backward import BackwardKernel
from tests.harness.range_edges import errors, filled, gradient_errors, run, truth
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")
KERNEL = Kernel("fp32 products", flat_numerics(operands="float32", exp="expf", block_n=16))
BACKWARD = BackwardKernel(
    "its backward", flat_gradients(operands="float32", exp="expf", block_m=0, block_n=0), KERNEL
)
CASE = Problem(seqlen_q=4, seqlen_kv=9, head_dim=16, dtype="bfloat16", softmax_scale=0.0, seed=3)
ROWS = torch.tensor([2.0**10, 2.0**58, 2.0**62, 2.0**70])[:, None]


def test_raw_scores_out_of_range() -> None:
    given = filled(CASE, q=ROWS, k=2.0**62)
    found = run(CASE, KERNEL, given)
    assert found.lse.isnan().flatten().tolist() == [False, False, True, True]
    assert errors(CASE, KERNEL, given, found).worst <= 1
    assert truth(CASE, KERNEL, given).lse_bound.isfinite().flatten().tolist() == [
        True,
        True,
        False,
        False,
    ]
    wrong = Result(found.out.clone(), found.lse)
    wrong.out[0, 0, 1, 2] += 1.0
    assert errors(CASE, KERNEL, given, wrong).worst > 1


def test_their_gradients() -> None:
    given = filled(CASE, q=ROWS, k=2.0**62)
    saved = run(CASE, KERNEL, given)
    assert max(gradient_errors(CASE, BACKWARD, given, saved).values()) <= 1


def test_a_masked_score_out_of_range() -> None:
    """The last key's score is large, or overflows, in every row: eight of the nine do not see
    it."""
    problem = CASE.but(seqlen_q=9, softmax_scale=1.0, mask=Causal())
    for size, asked in ((2.0**50, 8), (2.0**70, 0)):
        keys = torch.full((9, 1), 2.0**-64)
        keys[8] = size
        limits = truth(problem, KERNEL, filled(problem, q=2.0**64, k=keys))
        assert limits.out_bound.isfinite().all(-1).flatten().tolist() == [True] * asked + [
            False
        ] * (9 - asked)
    full = problem.but(mask=Full(), softmax_scale=0.25)
    assert bool(truth(full, KERNEL, filled(full)).out_bound.isfinite().all())
