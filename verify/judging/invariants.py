"""Slacks of relations that attention satisfies for any scores; they need no reference.

Every size comes from norms of rows, |q . k| <= |q| |k|, so a sequence of any length costs a few
passes over its tensors.  The derivation is in verify/oracles/convexity.py.  The terms are those of
docs/tolerance.md, with the largest score error of a row in place of the error of each score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from references.positions import Sizes
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import LOG_ERROR
from verify.judging.by_rows import norms, sizes
from verify.problem import Problem
from verify.tolerance.arithmetic import ANY_DIVISION, FP32_MAX, TINY, ForwardArithmetic, U, relative
from verify.tolerance.score_errors import flushed_score, grown, scale_overflows
from verify.tolerance.score_mods import factor_error, largest_error, narrow_roundings
from verify.tolerance.subnormals import Operands, whole
from verify.tolerance.weights import lifts
from verify.variant import GradientNumerics, Numerics
from verify.variant.numerics import leaves

# The fields of `Numerics` that the slacks cover; no slack is derived for any other declared field.
KNOWN = (
    *("products.operands", "products.float32_products", "products.instruction"),
    *("products.prescale", "products.promotion"),
    *("softmax.scores", "softmax.exp", "softmax.scale_roundings", "softmax.softcap_tanh"),
    *("softmax.block_n", "softmax.row_sum.lanes", "softmax.row_sum.apart"),
    # An order narrows what a kernel can do; the slacks hold for every one.
    *("order.head_dim", "softmax.maximum.key_order", "softmax.maximum.parts"),
    *("softmax.row_sum.lse",),
    *("output.probability", "output.values", "output.probability_scale", "output.normalised"),
    *("output.split_keys", "output.division", "output.roundings"),
)
# The same for `GradientNumerics`; oracles with exactly known answers use them too.
KNOWN_GRADIENTS = (
    *("products.operands", "products.float32_products", "products.instruction"),
    *("softmax.source", "softmax.exp"),
    *("softmax.scale_roundings", "softmax.softcap_tanh", "softmax.probability"),
    *("score_gradient.dtype", "score_gradient.of", "score_gradient.scaled"),
    *("sums.block_m", "sums.block_n", "sums.group", "sums.atomics", "sums.roundings"),
    *("order.head_dim", "order.keys", "order.rows"),
)


def beyond(declared: Numerics | GradientNumerics, known: Iterable[str]) -> str | None:
    """Why no slack is derived for these numerics: a field that is not in `known` differs from its
    default; or None."""
    return _underived(declared, tuple(known))


@lru_cache(maxsize=256)  # a campaign asks this of every case
def _underived(declared: Numerics | GradientNumerics, known: tuple[str, ...]) -> str | None:
    defaults = leaves(type(declared)())
    for path, value in leaves(declared).items():
        if path not in known and value != defaults[path]:
            return f"declares {declared.path}.{path} = {value!r}, for which nothing is derived"
    return None


def reach(p: Problem, q: Tensor, k: Tensor) -> Tensor:
    """An upper bound on |softmax_scale| sum |q| |k| by row, fp64 (batch, heads_q, seqlen_q)."""
    queries, keys = norms(q), norms(k)
    largest = keys.amax(-1) if p.seqlen_kv else keys.new_zeros(keys.shape[:2])
    found: Tensor = abs(p.scale) * queries * largest.repeat_interleave(p.group, 1)[..., None]
    return found


@dataclass(frozen=True)
class ForwardSlack:
    """The largest errors that a forward can make in each row, fp64 (batch, heads_q, seqlen_q).

    score: delta, of any exponent.  average: of an average of V for any scores, as a fraction of the
    largest |V|, without the output's rounding; absolute: the part from small numbers.
    lse: of the natural LSE.  beyond: rows that no slack covers, bool.
    """

    score: Tensor
    average: Tensor
    absolute: Tensor
    lse: Tensor
    beyond: Tensor


def misaligned(p: Problem, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
    """The largest error of a scaled score from subnormal operands, by row, fp64 (batch, heads_q,
    seqlen_q)."""
    return abs(p.scale) * operands.loss(p.head_dim, sizes(q), sizes_by_head(p, k))[..., 0]


def sizes_by_head(p: Problem, x: Tensor) -> Sizes:
    """Sizes of all K or V that a query head reads, (batch, heads_q, 1, 1)."""
    by_row = sizes(x)
    found = whole(Sizes(by_row.least.flatten(2), by_row.most.flatten(2)))
    return Sizes(
        *(size.repeat_interleave(p.group, 1)[..., None] for size in (found.least, found.most))
    )


def forward_slack(
    p: Problem,
    a: ForwardArithmetic,
    reached: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    cases: int = 1,
) -> ForwardSlack:
    """The slacks of a forward, from `reach` and the sizes of q, k and v (`given`, logical
    tensors).  cases: how many cases the sequences are of, the same number of each."""
    logs = math.log(max(p.seqlen_kv, 1))
    error = reached * ((1 + a.operand_roundings) * (1 + a.scores.kappa(p.head_dim)) - 1)
    error = error + misaligned(p, a.operands, *given[:2])
    error = error + flushed_score(a.scores, p, abs(p.scale) * a.operands.query * a.operands.key)
    error = error + factor_error(p, a) * (reached + error)
    if a.score_format is not None:
        roundings, step = narrow_roundings(p, a)
        error = error + relative(roundings, a.score_format.unit_roundoff) * (reached + error)
        error = error + a.score_format.smallest_subnormal * (1 + abs(p.scale) + step)
    error, top = largest_error(p, a, reached, error, a.score_format)
    top = top + error
    score = error + relative(3, U) * (2 * top + a.offset) + a.exps
    if a.merged:
        score = (
            score + U * ((11 + a.scale_roundings) * 2 * top + 12 * logs) + LOG_ERROR * (1 + logs)
        )
    sizes = top + logs
    adrift = torch.full_like(reached, -(p.seqlen_kv + a.blocks) * math.log1p(-U))
    if a.merged:
        adrift = (
            adrift
            + U * (4 * (sizes + score) + 4 * a.blocks)
            + LOG_ERROR * (1 + math.log(a.blocks))
            - math.log1p(-a.exp)
        )
    row_sum = -torch.expm1(-adrift)
    lse = (
        score
        + adrift
        + 3 * TINY * p.seqlen_kv
        + U * ((4 + a.scale_roundings) * top + 4 * (sizes + score))
    )
    lse = lse + U * 2 * (logs + a.offset) + LOG_ERROR * (1 + logs + a.offset + 2 * score)
    lift, growth = lifts(a, top + a.offset)
    absolute = (
        growth
        * (2 * p.seqlen_kv + a.between_blocks + 2 + a.output_roundings)
        * (TINY * a.largest_factor)
        + a.values.flush
    )
    # The later roundings and those of the row sum cannot double what V can lose to alignment.
    absolute = absolute + 2 * (
        a.weighted.by_operand + a.weighted.share * a.weighted.threshold * _lost(p, a, growth)
    )
    beyond = _beyond(p, a, given[:2], reached, lift)
    if a.prescaled:
        beyond = beyond | _prescaled_beyond(a, given[:2], cases)
    if a.conversion is not None:
        absolute = absolute + 2 * a.conversion.lost
        beyond = beyond | (_largest_value(p, given[2]) >= a.conversion.limit)
    average = _average(p, a, (lift, growth), row_sum)
    if a.partial is not None:  # the merge is an average of the parts' rounded O
        average = average + a.partial.unit_roundoff * (1 + average)
        absolute = absolute * (1 + a.partial.unit_roundoff) + a.partial.smallest_subnormal
        largest = _largest_value(p, given[2]) * (1 + average)
        beyond = beyond | (largest >= a.partial.overflow)
    return ForwardSlack(score, average, absolute, lse, beyond)


def _largest_value(p: Problem, v: Tensor) -> Tensor:
    """The largest |V| that a query head can read, fp64 (batch, heads_q, 1)."""
    most = v.new_zeros(p.batch, p.heads_kv, dtype=torch.float64)
    if p.seqlen_kv:
        most = v.abs().flatten(2).amax(-1).double()
    return most.repeat_interleave(p.group, 1)[..., None]


def _lost(p: Problem, a: ForwardArithmetic, growth: Tensor) -> Tensor:
    """The fraction of the row sum that small P can lose, at most 1."""
    return (
        (a.flush + 2 * TINY) * p.seqlen_kv * (torch.ones_like(growth) if a.normalised else growth)
    ).clamp(max=1.0)


def _average(
    p: Problem, a: ForwardArithmetic, errors: tuple[Tensor, Tensor], row_sum: Tensor
) -> Tensor:
    """The error that does not depend on the scores: rounding and flushes of P, the product,
    rescales, the row sum and the division.  errors: `Weights.lift` and `Weights.growth`."""
    lift, growth = errors
    fp32 = relative(a.between_blocks + ANY_DIVISION * a.normalised + (a.blocks + 2) * a.merged, U)
    rounding = (1 + a.probability_roundoff) * (1 + a.values.kappa(p.seqlen_kv)) * (1 + fp32) - 1
    if a.conversion is not None:
        rounding = (1 + rounding) * (1 + a.conversion.roundoff) - 1
    lost = (_lost(p, a, growth) * (1 + a.weighted.share)).clamp(max=1.0)
    if a.saturates:
        lost = lost + (1 - a.saturates / lift).clamp(min=0.0)
    slack: Tensor = (rounding + lost + row_sum) / (1 - row_sum)
    return slack + relative((0 if a.normalised else ANY_DIVISION) + a.output_roundings, U) * (
        1 + slack
    )


def largest_of_cases(x: Tensor, cases: int) -> Tensor:
    """The largest |x| of each case that is stacked along the batch, fp64 (batch), the same for each
    of its sequences."""
    largest = x.abs().reshape(cases, -1).amax(1).double()
    return largest.repeat_interleave(len(x) // cases)


def _prescaled_beyond(a: ForwardArithmetic, given: tuple[Tensor, Tensor], cases: int) -> Tensor:
    """Sequences of cases in which Q or K can overflow when it is scaled, bool (batch, 1, 1)."""
    most = dtype_named(a.prescaled).overflow
    parts = zip(given, (a.operands.query, a.operands.key), strict=True)
    q, k = (largest_of_cases(x, cases) / part / math.log(2) >= most for x, part in parts)
    return (q | k)[:, None, None]


def _beyond(
    p: Problem,
    a: ForwardArithmetic,
    given: tuple[Tensor, Tensor],
    reached: Tensor,
    lift: Tensor,
) -> Tensor:
    """Rows in which a score, masked or not, a P or the row sum can overflow, as in
    `verify.tolerance.forward`."""
    scale = min(abs(p.scale), 1.0)
    raw = reached if p.scale else reach(p.but(softmax_scale=1.0), *given)
    stage = (
        max(1 / math.log(2), 1 / (abs(p.scale) * a.least_factors[0]))
        if p.scale
        else 1 / a.least_factors[0]
    )
    outside = raw * stage * grown(a, p) >= FP32_MAX
    most = a.reach * lift
    outside = outside | (p.seqlen_kv * most >= 1 / TINY)
    if not (a.saturates or a.normalised):
        outside = outside | (most >= a.probability.overflow)
    if a.score_format is not None and a.score_format.name == "float16":
        outside = outside | (2 * reached >= a.score_format.overflow * scale)
    return outside | (a.prescaled == "float16" and abs(p.scale) > 1) | scale_overflows(a, p)
