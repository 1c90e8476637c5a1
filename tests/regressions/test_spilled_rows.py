"""A bfloat16 product on a CPU with AMX takes NaN from the next row into a row (docs/findings.md,
15)."""

from __future__ import annotations

import math

import torch

from verify.arithmetic.mma import unit_for
from verify.arithmetic.unit import spilled
from verify.cell.plain_functions import WEAKEST
from verify.judging.comparison import compare
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import Config

# Row 13 of the last head is all zeros, and its scores are 0; those of row 14 overflow.
PROBLEM = Problem.parse(
    "b=3,hq=2,hkv=2,sq=32,skv=200,d=64,dtype=bfloat16,scale=8.507059173023462e+37,dist=low_rank,seed=238"
)
ROW = (2, 1, 13)


def judged(problem: Problem) -> tuple[torch.Tensor, Truth]:
    """What eager attention gives, (batch, heads, seqlen_q, head_dim), and the truth of it."""
    inputs = tensors(problem)
    scores = (inputs.q @ inputs.k.mT) * problem.scale
    arithmetic = resolve(WEAKEST, Config(), problem, "cpu")
    truth = compute_truth(problem, dequantised(problem, inputs), [arithmetic])
    return torch.softmax(scores, -1) @ inputs.v, truth


def worst(got: torch.Tensor, truth: Truth) -> float:
    return compare(got, truth.out, truth.out_bound, PROBLEM.format_out).worst


def test_a_row_before_one_that_overflows_may_be_nan() -> None:
    out, truth = judged(PROBLEM)
    assert truth.out[ROW].isfinite().all()
    assert worst(out, truth) <= 1


def test_other_finite_rows_are_judged() -> None:
    out, truth = judged(PROBLEM.but(distribution="range_edges", seed=48, softmax_scale=1.0))
    finite = truth.out_bound.isfinite().all(-1)
    assert 0 < int(finite.sum()) < finite.numel()
    assert worst(out, truth) <= 1
    for row in finite.nonzero()[:: finite.numel() // 16].tolist():
        wrong = out.clone()
        wrong[tuple(row)] = math.nan
        assert worst(wrong, truth) == math.inf


def test_only_the_row_before_is_spilled_into() -> None:
    bound = torch.ones(2, 4, 3)
    bound[0, 2, 1] = math.inf
    bound[1, 0] = math.inf
    infinite = spilled(bound).isinf().all(-1)
    assert infinite.tolist() == [[False, True, False, False], [True, False, False, False]]
    assert torch.equal(spilled(torch.ones(2, 4, 3)), torch.ones(2, 4, 3))


def test_no_gpu_and_no_interpreter_spills() -> None:
    assert unit_for("cpu", "bfloat16").spills
    assert not any(unit_for(arch, "bfloat16").spills for arch in ("sm_80", "sm_90", "interpreter"))
