"""Sums that gradients satisfy for any scores, with slacks that need no reference.

    sum_j dV_j = sum_i dO_i       sum_j dK_j = 0 (linear scores)
    <dQ, Q> = <dK, K>             <dV, V> = <dO, O>

They hold for each key head over the rows that see a key; the query heads of a group are summed.
They follow from sum_j P_ij = 1, hence sum_j dS_ij = 0, and from reordering the sums in dQ = s dS K,
dK = s dS^T Q, dV = P^T dO.  The derivation is in verify/oracles/gradient_sums.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.positions import Sizes
from references.premises import Premise
from verify.arithmetic.mma import Unit
from verify.judging.invariants import (
    forward_slack,
    largest_of_cases,
    misaligned,
    reach,
    sizes_by_head,
)
from verify.problem import Problem
from verify.problem.premises import broken
from verify.problem.visibility import live_rows
from verify.tolerance.arithmetic import ANY_DIVISION, FP32_MAX, TINY, ForwardArithmetic, U, relative
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_sums import rules_of
from verify.tolerance.score_errors import flushed_score
from verify.tolerance.score_mods import factor_error, largest_error, largest_slope

_LINEAR = frozenset({Premise.LINEAR_SCORES})


@dataclass(frozen=True, eq=False)
class GradientTensors:
    """Inputs and results of a backward, logical tensors of any float dtype.  out and lse (natural
    logarithm) are the saved ones, or exact ones if the backward computes its own softmax."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class Invariant:
    """left should equal right within slack: fp64 (batch, heads_kv, columns), or (batch, heads_kv)
    for a scalar product."""

    name: str
    formula: str
    left: Tensor
    right: Tensor
    slack: Tensor


@dataclass(frozen=True, eq=False)
class _Rows:
    """Error bounds of each query row, fp64 (batch, heads_q, seqlen_q), 0 in rows without a key.

    weights: of sum_j |P^_ij - P_ij|, P^ being the P in its product.  factor: of |dP - D|.
    scores: of sum_j |dS^_ij - dS_ij|.  output: of sum_d |dO_id| |O^_id - O_id|.
    """

    weights: Tensor
    factor: Tensor
    scores: Tensor
    output: Tensor


def invariants(
    p: Problem,
    g: GradientTensors,
    forward: ForwardArithmetic,
    backward: GradientArithmetic,
    cases: int = 1,
) -> list[Invariant]:
    """The invariants that hold for this problem, which must have a row and a key.  A slack is +inf
    if the declared arithmetic can overflow.

    cases: how many cases of one shape the sequences are of, the same number of each.
    """
    q, k, v, dout = (x.double() for x in (g.q, g.k, g.v, g.dout))
    dq, dk, dv = (x.double() for x in (g.dq, g.dk, g.dv))
    live = live_rows(p)
    dout = dout.masked_fill(~live[..., None], 0.0)
    rows = _rows(p, g, dout, forward, backward, cases)
    u, a = backward.output.unit_roundoff, backward
    # Loss of small numbers in an element's cast, and with `cast` in those of its query heads.
    tiny = (1 + p.group * a.cast) * (a.output.smallest_subnormal / 2 + TINY)
    by_p = _by_product(p, a, a.weights, 0)
    by_k = (1 + _by_product(p, a, a.score_gradients, 1)) * (1 + a.prescaled) - 1
    by_q = (1 + a.score_gradients.kappa(p.seqlen_kv)) * (
        1 + relative(a.blocks_n + a.gradient_roundings + 1, U)
    )
    by_q = by_q * (1 + a.prescaled) - 1
    largest = torch.stack([largest_of_cases(x, cases) for x in (q, k, v, dout)])
    most = 1 + largest.amax(0)[:, None]  # (batch, 1)
    flush = max(TINY, a.weights.flush, a.score_gradients.flush)
    flushed = (
        4
        * flush
        * p.group
        * (p.seqlen_q + 1)
        * (p.seqlen_kv + 1)
        * most**2
        * max(1.0, abs(p.scale))
    )
    rules = rules_of(p, a)
    aligned = rules["dv"].weighted, rules["dq"].weighted
    error_p = rows.weights * (1 + aligned[0].share) + by_p * (1 + rows.weights)
    size_ds, lost_ds = rows.factor + rows.scores, rows.scores * (1 + aligned[1].share)
    error_k, error_q = lost_ds + by_k * size_ds, lost_ds + by_q * size_ds
    # Loss in each column from subnormal Q, K and dO, by the weights of each row.
    each = [x.by_operand + x.share * x.threshold for x in aligned]
    lost = each[0] * (1 + rows.weights) + (each[1] * abs(p.scale) + a.coarse) * size_ds
    small = _fold(lost.sum(2), p) * (2 * most * max(p.head_dim, p.head_dim_v))
    found = []

    def add(name: str, formula: str, left: Tensor, right: Tensor, slack: Tensor) -> None:
        """Add flushes and small numbers to a slack; it already holds the rounding of the output."""
        slack = torch.where(
            slack < FP32_MAX,
            slack
            + (flushed if slack.ndim == 2 else flushed[..., None])
            + (small if slack.ndim == 2 else small[..., None]),
            torch.inf,
        )
        found.append(
            Invariant(name, formula, left, right, slack.nan_to_num(nan=torch.inf, posinf=torch.inf))
        )

    per_key = [x.norm(dim=-1) for x in (k, v)]
    largest_v = (
        per_key[1].amax(-1) if p.seqlen_kv else per_key[1].new_zeros(p.batch, p.heads_kv)
    ).repeat_interleave(p.group, 1)
    add(
        "dv",
        "sum dV = sum dO",
        dv.sum(2),
        _fold(dout.sum(2), p),
        _fold((dout.abs() * error_p[..., None]).sum(2), p) + (u * dv.abs() + tiny).sum(2),
    )
    if broken(_LINEAR, p) is None:
        sizes = _fold((q.abs() * error_k[..., None]).sum(2) * abs(p.scale), p) + (
            u * dk.abs() + tiny
        ).sum(2)
        add("dk", "sum dK = 0", dk.sum(2), torch.zeros_like(sizes), sizes)
    reached = reach(p, g.q, g.k).masked_fill(~live, 0.0)
    own = (
        ((u * dq.abs() + tiny) * q.abs()).sum((2, 3)),
        ((u * dk.abs() + tiny) * k.abs()).sum((2, 3)),
    )
    add(
        "dq",
        "<dQ, Q> = <dK, K>",
        _fold((dq * q).sum((2, 3)), p),
        (dk * k).sum((2, 3)),
        _fold((reached * (error_q + error_k)).sum(2) + own[0], p) + own[1],
    )
    saved = g.out.double().masked_fill(~live[..., None], 0.0)
    sizes = dout.norm(dim=-1) * largest_v[..., None] * error_p + rows.output
    add(
        "dv_v",
        "<dV, V> = <dO, O>",
        (dv * v).sum((2, 3)),
        _fold((dout * saved).sum((2, 3)), p),
        _fold(sizes.sum(2), p) + ((u * dv.abs() + tiny) * v.abs()).sum((2, 3)),
    )
    return found


def _by_product(p: Problem, a: GradientArithmetic, unit: Unit, roundings: int) -> float:
    """Error of the sums of dK or dV over a group's rows, casts included, as a fraction of the
    magnitudes that they add."""
    sums = relative(p.group * a.blocks_m + a.gradient_roundings + roundings, U)
    return (1 + unit.kappa(p.seqlen_q * p.group)) * (1 + sums) * (
        1 + a.output.unit_roundoff * a.cast
    ) - 1


def _fold(x: Tensor, p: Problem) -> Tensor:
    """(batch, heads_q, ...) summed over each group."""
    return x.reshape(p.batch, p.heads_kv, p.group, *x.shape[2:]).sum(2)


def _rows(
    p: Problem,
    g: GradientTensors,
    dout: Tensor,
    forward: ForwardArithmetic,
    a: GradientArithmetic,
    cases: int,
) -> _Rows:
    live = live_rows(p)
    reached = reach(p, g.q, g.k)
    slack = forward_slack(p, forward, reached, (g.q, g.k, g.v), cases)
    lse = g.lse.double().abs().masked_fill(~live, 0.0)
    # Error of the exponent of P, and of the saved LSE or the backward's own row sum.
    score = reached * ((1 + a.prescaled) * (1 + a.scores.kappa(p.head_dim)) - 1) + misaligned(
        p, a.operands, g.q, g.k
    )
    score = score + flushed_score(a.scores, p, abs(p.scale) * a.operands.query * a.operands.key)
    score = score + factor_error(p, a) * (reached + score)
    score, largest_score = largest_error(p, a, reached, score)
    exponent = largest_score + lse + score
    delta = score + relative(4, U) / 4 * 3 * exponent - math.log1p(-a.exp)
    sums = relative(p.seqlen_kv + 2, U)
    if a.own:
        delta = (
            (2 + relative(3, U)) * delta + sums + relative(ANY_DIVISION, U) + 2 * p.seqlen_kv * TINY
        )
    else:
        delta = delta + slack.lse
    grown = torch.exp(delta)
    of_p, of_ds = (
        0.0 if t.precision >= 24 else t.unit_roundoff for t in (a.probability, a.score_gradient)
    )
    lost = [
        p.seqlen_kv * (max(t.smallest_subnormal / 2, TINY) + 2 * TINY)
        for t in (a.probability, a.score_gradient)
    ]
    weights = grown * (1 + of_p) - 1 + lost[0]
    # |dP - D| from norms in place of sums, with D from the saved O.
    v = g.v.double().abs()
    largest = v.norm(dim=-1).amax(-1).repeat_interleave(p.group, 1)[..., None]
    columns = v.amax(2, keepdim=True).repeat_interleave(p.group, 1)
    moved = (torch.expm1(2 * slack.score) * 2).clamp(max=2.0) + slack.average
    u_o = forward.output.unit_roundoff
    error_o = (moved[..., None] * columns + slack.absolute[..., None]) * (1 + u_o)
    error_o = (
        error_o
        + u_o * g.out.double().abs().nan_to_num(nan=math.inf, posinf=math.inf)
        + forward.output.smallest_subnormal / 2
    )
    output = (dout.abs() * error_o).sum(-1).masked_fill(~live, 0.0)
    if a.sums_delta:  # O is not read
        output = torch.zeros_like(output)
    product = dout.norm(dim=-1) * largest
    terms = p.head_dim_v + 1
    factor = 2 * product
    small = (
        a.factors.loss(terms, Sizes.of(dout, -1), sizes_by_head(p, g.v))[..., 0] + 4 * terms * TINY
    )
    summed, between = output, 1
    largest_p = grown * (1 + of_p) + lost[0] if a.rounded else grown
    if a.sums_delta:  # D is a sum of inexact weights and dP, and dS has two products
        summed = product * (largest_p * (1 + a.scores.kappa(terms)) * (1 + sums) - 1)
        summed, between = summed + largest_p * small + 2 * p.seqlen_kv * TINY * (1 + product), 3
    off = (
        summed
        + relative(terms, U) * (product + summed)
        + a.scores.kappa(terms) * (factor + summed)
        + small
    )
    off = off + relative(between, U) * (factor + off)
    slope = largest_slope(p, a, score)
    roundings = between + (1 if a.factor == 1 else 2)
    cut = lost[1] * max(1.0, 1 / a.factor)
    scores = (
        largest_p * (1 + of_ds) * (1 + relative(roundings, U)) * slope * (factor + off)
        - factor
        + cut
    )
    beyond = (
        slack.beyond
        | (reached >= FP32_MAX * (min(abs(p.scale), 1.0) or 1.0))
        | (factor + off >= FP32_MAX)
    )
    beyond = beyond | (grown >= a.probability.overflow)
    narrow = largest_p * (factor + off) * a.factor >= a.score_gradient.overflow
    hidden = ~live
    return _Rows(
        weights=weights.masked_fill(beyond, math.inf).masked_fill(hidden, 0.0),
        factor=factor.masked_fill(hidden, 0.0),
        scores=scores.masked_fill(beyond | narrow, math.inf).masked_fill(hidden, 0.0),
        output=output.masked_fill(slack.beyond & live, math.inf),
    )
