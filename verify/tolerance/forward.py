"""Elementwise hard bounds for O and LSE of the forward pass.  The derivation is docs/tolerance.md;
names follow it.

An error in a score of `delta` (natural units, relative error of the exponential included) moves a
probability by at most a factor e^(+-delta); what remains are the roundings of P, of the product
with V, of the row sum, of the division and of the output.  Every term is a rigorous worst case, not
a first-order one: `e = expm1(delta)`, and the denominators stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.masks import Full
from references.row_blocks import RowBlock
from verify.arithmetic.dtypes import DTYPES, dtype_named
from verify.arithmetic.instructions import LOG_ERROR
from verify.arithmetic.mma import Promoted
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, ForwardArithmetic, U, relative
from verify.tolerance.averages import Values
from verify.tolerance.forward_known import interval_of, known_sum, lattice
from verify.tolerance.forward_maxima import rescaling_blocks
from verify.tolerance.forward_sums import Sums, before_output
from verify.tolerance.intervals import Interval
from verify.tolerance.resolution import BEST, resolve
from verify.tolerance.scaled_output import out_bound
from verify.tolerance.scratch import Room, room_on
from verify.tolerance.subnormals import whole
from verify.tolerance.weights import (
    DIRECT,
    Weights,
    largest_of,
    loss_of,
    product_error,
    weights_of,
)

__all__ = ["BEST", "ForwardArithmetic", "ForwardBound", "bound", "resolve"]

# Elements of one (rows, keys) tensor, of which some six live at once: on a CPU what caches hold,
# and rows enough for products.
_PART = 2**19
_LN_2 = math.log(2)  # a kernel that computes in base 2 multiplies a score by 1 / ln 2 more
# Of ln 2 (m + log2 l): its sum, its product, and the constant, which is off by 0.05 of one.
LOG2_ROUNDINGS = 2.1


@dataclass(frozen=True)
class ForwardBound:
    """Tolerances: out (heads, rows, head_dim_v), lse (heads, rows); fp64, and 0 where the result
    must be exact.  An O in 8 bits is judged as it is stored, see `scaled_output`.

    +inf in the rows whose products may overflow on the way: no number that they hold is wrong.
    """

    out: Tensor
    lse: Tensor
    # where O lies before its last rounding, if an order of keys is declared
    interval: Interval | None = None
    # how far the natural LSE may be off before its sum with the maximum and its product with ln 2,
    # (heads, rows), if these are declared
    lse_reach: Tensor | None = None


def bound(
    block: RowBlock,
    arithmetic: ForwardArithmetic,
    problem: Problem,
    above: Tensor | None = None,
) -> ForwardBound:
    """The bounds of every output element of a block of whole rows.

    above: how far the maximum that rows share may lie above each one's own, (heads, rows), as
    `maxima.shared_excess` gives it.  Raises ValueError where rows share one and it is missing.
    """
    if arithmetic.maximum_rows != 1 and above is None:
        raise ValueError(
            "rows share a maximum: the bound is one of other rows, which are not given"
        )
    full, room = bool(block.visible.all()), room_on(block.scores.device)
    values = Values.of(block, full)
    if block.scores.numel() <= _PART or block.scores.is_cuda:
        return _bound(block, values, arithmetic, problem, full, room, above)
    found = ForwardBound(torch.empty_like(block.out), torch.empty_like(block.lse))
    if arithmetic.ordered:
        span = Interval(torch.empty_like(block.out), torch.empty_like(block.out))
        found = replace(found, interval=span)
    if arithmetic.log2_sum:
        found = replace(found, lse_reach=torch.empty_like(block.lse))
    size = arithmetic.block_n if arithmetic.key_order != "any" else 1
    for heads, rows, keys in _parts(block, full, size):
        part = _cut(block, heads, rows, keys)
        ahead = None if above is None else above[heads, rows]
        made = _bound(part, values.cut(heads, keys), arithmetic, problem, full, room, ahead)
        found.out[heads, rows], found.lse[heads, rows] = made.out, made.lse
        if found.lse_reach is not None and made.lse_reach is not None:
            found.lse_reach[heads, rows] = made.lse_reach
        if found.interval is not None and made.interval is not None:
            found.interval.middle[heads, rows] = made.interval.middle
            found.interval.reach[heads, rows] = made.interval.reach
    return found


def _parts(block: RowBlock, full: bool, size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Heads, rows and the keys between the first and the last that one of them sees; the first is
    that of a block of `size` keys (0: all)."""
    heads, rows, keys = block.scores.shape
    step = max(_PART // keys, 1)
    together = max(step // max(rows, 1), 1)
    for head in range(0, heads, together):
        for row in range(0, rows, step):
            index = slice(head, min(head + together, heads)), slice(row, min(row + step, rows))
            if full:
                yield *index, slice(0, keys)
            else:
                seen = block.visible[index].flatten(0, 1).any(0).nonzero()
                first = int(seen[0]) // size * size if len(seen) and size else 0
                yield *index, slice(first, int(seen[-1]) + 1 if len(seen) else 1)


def _cut(block: RowBlock, heads: slice, rows: slice, keys: slice) -> RowBlock:
    pairs = {name: getattr(block, name)[heads, rows, keys] for name in _PAIRS}
    single = {
        name: getattr(block, name)[heads, rows] for name in ("row_max", "row_sum", "out", "lse")
    }
    return replace(
        block,
        index=(_inside(block.index[0], heads), _inside(block.index[1], rows)),
        keys=_inside(block.keys, keys),
        **pairs,
        **single,
        rows=block.rows[rows],
        values=block.values[heads, keys],
        query_sizes=block.query_sizes.cut(heads, rows),
        key_sizes=block.key_sizes.cut(heads),
        value_sizes=block.value_sizes.cut(heads),
        queries=block.queries[heads, rows],
        keys_of_heads=block.keys_of_heads[:, keys],
        key_heads=block.key_heads[heads],
    )


def _inside(whole: slice, part: slice) -> slice:
    return slice(whole.start + part.start, whole.start + part.stop)


_PAIRS = ("scores", "scaled", "magnitude", "visible", "probabilities")


def _bound(
    block: RowBlock,
    values: Values,
    a: ForwardArithmetic,
    problem: Problem,
    full: bool,
    room: Room,
    above: Tensor | None,
) -> ForwardBound:
    size = block.out.abs()
    w = weights_of(block, a, problem, full, room, above)
    # Reads what the next lines overwrite.
    known = known_sum(block, values, a, problem, w, room) if a.knows_p else None
    # Computed weights are a convex combination too: no weighted sum leaves the range, or the
    # largest magnitude, of V.
    jacobian = (values.deviation(w.grown, block.out) / w.total).masked_fill_(w.hopeless, torch.inf)
    jacobian = torch.minimum(jacobian, values.spread)
    carried = torch.where(
        w.hopeless,
        values.most,
        torch.minimum(torch.bmm(w.upper, values.size) / w.total, values.most),
    )
    lost = _lost(block, a, w, values, full)
    if a.leads and a.normalised:  # what is flushed before the division
        lost = lost + (2 * TINY + a.vanishing) * w.growth * w.lead * w.keys * values.most
    apart = a.row_sum == "unrounded"  # else the roundings of P are those of the weights
    probability = a.probability_roundoff * apart
    sums = Sums(jacobian, carried, probability, lost, lost, size)
    pre, exact, rounding = before_output(block, values, a, problem, w, sums)
    row_sum = -torch.expm1(-w.normaliser)
    out = out_bound(size, pre, a.output, problem.scaled_output)
    # but where a weight may overflow, whose product with 0 is NaN
    out = out.masked_fill(exact, 0.0)
    log_sum = _lse_bound(block, a, problem, w)
    lse = log_sum.bound[..., 0]
    unseen = _unseen_overflows(block, a, problem)
    beyond = _overflows(block, a, problem) | unseen
    reached = (
        carried * (1 + rounding) * a.probability_scale / (1 - row_sum)
        if a.normalised
        else values.most
    )
    if a.conversion is not None:
        reached = reached * (1 + a.conversion.roundoff)
        # A key that no row sees adds 0 times infinity.
        out = out.masked_fill(block.value_sizes.most >= a.conversion.limit, torch.inf)
    out = out.masked_fill(beyond | _exceeds(reached / a.least_factors[1], a, w, problem), torch.inf)
    unweighted, unsummed = _spoiled(a, w, problem)
    out, lse = (
        out.masked_fill(unweighted | unsummed, torch.inf),
        lse.masked_fill(unsummed[..., 0], torch.inf),
    )
    settled = w.empty & ~unseen  # but where NaN may come of a masked score
    lse = lse.masked_fill(beyond[..., 0], torch.inf).masked_fill(settled[..., 0], 0.0)
    out = out.masked_fill(settled, 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    reach = None
    if a.log2_sum:
        reach = log_sum.reach[..., 0].nan_to_num(nan=torch.inf)
        reach = reach.masked_fill(lse.isinf() | w.empty[..., 0], torch.inf)
    if not a.ordered:
        return ForwardBound(out, lse, lse_reach=reach)
    if known is None:
        return ForwardBound(out, lse, lattice(block.out, pre, out), reach)
    carried = carried * (1 + a.probability_roundoff) + lost
    sums = Sums(known.moved, carried, 0.0, torch.zeros_like(lost), lost, known.middle.abs())
    sharp = before_output(block, values, a, problem, w, sums)[0]
    return ForwardBound(out, lse, interval_of(known, sharp, block.out, out, pre), reach)


def _exceeds(values: Tensor, a: ForwardArithmetic, w: Weights, problem: Problem) -> Tensor:
    """Mask of the elements whose sum of P V can overflow the accumulator.

    values: the size of that sum if P is normalised; otherwise the largest |V|, and only p~ <= 1 is
    known.
    """
    if a.normalised:
        reach = part = values
    else:
        keys = w.keys.clamp(max=a.values.every) if isinstance(a.values, Promoted) else w.keys
        reach, part = (n * w.growth * a.reach * values for n in (w.keys, keys))
    beyond = reach >= FP32_MAX
    return (
        beyond | (part >= a.values.domain(problem.seqlen_kv))
        if a.values.accumulator != "float32"
        else beyond
    )


def _spoiled(a: ForwardArithmetic, w: Weights, problem: Problem) -> tuple[Tensor, Tensor]:
    """Rows (heads, rows, 1) in which a P may overflow its format, and those in which the row sum
    may overflow, or its reciprocal underflow.

    Infinity times 0 and infinity over infinity are NaN: columns of zeros are spoiled, too.
    """
    own = w.reach >= DTYPES[a.exponential.argument].overflow
    unsummed = own | (w.keys * w.reach >= 1 / TINY)
    bounded = a.saturates or (a.normalised and not a.by_lse)
    rounded = own if bounded else own | (w.reach >= a.probability.overflow)
    if a.row_sum != "unrounded":
        unsummed = unsummed | rounded
    if a.row_sum == "mma":
        unsummed = unsummed | _exceeds(torch.ones_like(w.keys), a, w, problem)
    return rounded, unsummed


def _lost(block: RowBlock, a: ForwardArithmetic, w: Weights, values: Values, full: bool) -> Tensor:
    """What O may lose because small P are rounded absolutely or flushed: no more of any weight than
    it may be."""
    most, cut = loss_of(a) * w.share * w.total, w.upper
    if not cut.shape[-1]:
        return torch.zeros_like(block.out)
    if a.vanishing:
        cut = cut.fill_(torch.inf)  # no result need be so small as a weight
    elif bool(w.hopeless.any()):
        cut = cut.masked_fill(w.hopeless, torch.inf)
    if full and bool((cut.amin(-1, keepdim=True) >= most).all()):
        return most / w.total * values.size.sum(1, keepdim=True)
    least = torch.minimum(cut, most, out=w.upper)
    return torch.bmm(least if full else least.mul_(block.visible), values.size) / w.total


def overflows(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """Rows (heads, rows, 1) in which some score may overflow, be it masked."""
    return _overflows(block, a, problem) | _unseen_overflows(block, a, problem)


def _overflows(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """Rows (heads, rows, 1) in which a score may overflow in any step: such a row is outside the
    arithmetic.

    fp16 scores or sums of them under a scale of 0, and fp16 operands that a scale above 1
    multiplies, count as if they overflowed.
    """
    scale = min(abs(problem.scale) * a.least_factors[0], 1.0)
    narrow = a.score_format is not None and a.score_format.name == "float16"
    if ((narrow or a.scores.accumulator == "float16") and not scale) or (
        a.prescaled == "float16" and abs(problem.scale) > 1
    ):
        return torch.ones_like(block.row_max, dtype=torch.bool)[..., None]
    largest, growth = largest_of(block.magnitude), 1 + a.operand_roundings
    limit = min(FP32_MAX, a.scores.domain(problem.head_dim))
    beyond = (largest * growth >= limit * scale) & (scale > 0)
    if narrow and a.score_format is not None:
        size = block.scaled.abs().masked_fill_(~block.visible, 0.0)
        beyond |= (
            largest_of(size.add_(block.magnitude, alpha=product_error(a, problem)))
            >= a.score_format.overflow * scale
        )
    # In base 2, the product and its factor with all their errors.
    return beyond | (largest * _grown(a, problem) >= FP32_MAX * _LN_2)


def _grown(a: ForwardArithmetic, problem: Problem) -> float:
    """What a score may be larger by for its errors."""
    return (1 + product_error(a, problem)) * (1 + relative(a.scale_roundings + 3, U))


def _unseen_overflows(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """The same where `RowBlock.magnitude` does not tell: sums under a scale of 0, scores that are
    masked after they were computed, operands that the scale has multiplied.

    A masked score of +inf to which a mask of -inf is added is NaN, and so is 0 times infinity.
    """
    queries, keys = block.query_sizes.most, block.key_sizes.most
    factor, growth = abs(problem.scale) / _LN_2, _grown(a, problem)
    beyond = torch.full_like(queries, factor, dtype=torch.float64) >= FP32_MAX
    if not problem.scale or not isinstance(problem.mask, Full):
        raw = queries * keys.sum(-1, keepdim=True) * growth
        beyond |= raw * max(factor, 1 / a.least_factors[0]) >= FP32_MAX
    if a.prescaled:
        # `Operands` holds what the reference's numbers are divided by there.
        for size, part in (
            (queries, a.operands.query),
            (whole(block.key_sizes).most, a.operands.key),
        ):
            beyond = beyond | (size / part * growth / _LN_2 >= dtype_named(a.prescaled).overflow)
    return beyond


@dataclass(frozen=True)
class _LogSum:
    """Of the natural LSE, (heads, rows, 1): its bound, and what it may be off before its last one
    or two roundings; +inf for the latter where these are not declared."""

    bound: Tensor
    reach: Tensor


def _lse_bound(block: RowBlock, a: ForwardArithmetic, problem: Problem, w: Weights) -> _LogSum:
    """LSE = m + ln l: the errors of the row sum and its logarithm, and the fp32 roundings of both
    terms.

    m enters twice, as subtracted and as added, and may be scaled by differently rounded factors,
    unless it is declared that it is not.
    """
    log_sum = (
        torch.where(w.empty, 0.0, torch.log(block.row_sum.clamp(min=1.0))[..., None])
        + 2 * w.largest
        + a.offset
    )
    log_sum = log_sum + w.ahead
    lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None] + w.largest
    moved = torch.maximum(torch.log1p(w.moved), -torch.log(w.total))
    # No log-sum-exp moves by more than its largest score does.
    moved = torch.where(w.largest > DIRECT, w.largest, torch.minimum(moved, w.largest))
    summed = (
        moved
        + w.drift
        + (2 * TINY + max(TINY, a.vanishing)) * w.keys * (w.share if a.vanishing else 1.0)
    )
    maxima = (4 + a.scale_roundings) * (w.top + a.lag + w.ahead)
    found = summed + U * (maxima + 4 * lse + 2 * log_sum) + LOG_ERROR * (1 + log_sum)
    if not a.log2_sum:
        return _LogSum(found, torch.full_like(found, torch.inf))
    if problem.score_mod is None and a.score_format is None and not a.prescaled:
        # Nothing changes the base of a difference: two of the three roundings in `weights_of`.
        peak = block.row_max.abs().nan_to_num(posinf=0.0)[..., None]
        changed = (relative(3, U) - relative(1, U)) * (w.error + peak + a.offset + w.ahead)
        summed = summed - torch.minimum(changed, moved)
    summed = summed - _unchanged(block, a, problem, w).clamp(max=summed)
    apart = U * log_sum * (a.probability_scale != 1)  # log2 l - log2 s
    reach = summed + apart + LOG_ERROR * log_sum.clamp(min=_LN_2)
    last = U * LOG2_ROUNDINGS * (lse + reach)
    return _LogSum(torch.fmin(found, reach + last), reach)


def _unchanged(block: RowBlock, a: ForwardArithmetic, problem: Problem, w: Weights) -> Tensor:
    """What `weights_of` allows, of the LSE, for rescales by exp(0) = 1: behind blocks that do not
    change the maximum, if their order is declared; (heads, rows, 1)."""
    none = torch.zeros_like(w.total)
    if not a.rescales_by_one or a.row_sum != "unrounded" or a.ones:
        return none
    changes = rescaling_blocks(block, a, problem, w.error)
    if changes is None:
        return none
    each = U - math.log1p(-a.rescale.error)  # of the product, and of its factor
    return (a.blocks - changes).clamp(min=0.0) * each
