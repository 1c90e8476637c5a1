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
from verify.arithmetic.mma import Promoted
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, ForwardArithmetic
from verify.tolerance.averages import Values
from verify.tolerance.forward_known import interval_of, known_sum, lattice
from verify.tolerance.forward_log_sum import log_sum_of
from verify.tolerance.forward_sums import Sums, before_output
from verify.tolerance.integers import TINY_ROW, Steps
from verify.tolerance.intervals import Interval
from verify.tolerance.resolution import BEST, resolve
from verify.tolerance.scaled_output import out_bound
from verify.tolerance.score_errors import grown, largest_of, product_error, scale_overflows
from verify.tolerance.scratch import Room, room_on
from verify.tolerance.subnormals import whole
from verify.tolerance.weights import Weights, loss_of, weights_of

__all__ = ["BEST", "ForwardArithmetic", "ForwardBound", "bound", "resolve"]

# Elements of one (rows, keys) tensor, of which some six live at once: on a CPU what caches hold,
# and rows enough for products.
_PART = 2**19
_LN_2 = math.log(2)  # a kernel that computes in base 2 multiplies a score by 1 / ln 2 more


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
    steps: Steps | None = None,
) -> ForwardBound:
    """The bounds of every output element of a block of whole rows.

    above: how far the maximum that rows share may lie above each one's own, (heads, rows), as
    `maxima.shared_excess` gives it.  steps: of the integers that Q and K are rounded to.  Raises
    ValueError where rows share a maximum, or Q and K become integers, and that is missing.
    """
    if arithmetic.integers is not None and steps is None:
        raise ValueError(
            "Q and K become integers: the bound is one of other rows and keys, which are not given"
        )
    if arithmetic.maximum_rows != 1 and above is None:
        raise ValueError(
            "rows share a maximum: the bound is one of other rows, which are not given"
        )
    full, room = bool(block.visible.all()), room_on(block.scores.device)
    values = Values.of(block, full)
    if block.scores.numel() <= _PART or block.scores.is_cuda:
        return _bound(block, values, arithmetic, problem, full, room, (above, steps))
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
        of_others = ahead, steps
        made = _bound(part, values.cut(heads, keys), arithmetic, problem, full, room, of_others)
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
    of_others: tuple[Tensor | None, Steps | None],
) -> ForwardBound:
    """of_others: `above` and `steps` of `bound`."""
    size = block.out.abs()
    w = weights_of(block, a, problem, full, room, *of_others)
    # Reads what the next lines overwrite.
    known = known_sum(block, values, a, problem, w, room) if a.knows_p else None
    # Computed weights are a convex combination too: no weighted sum leaves the range, or the
    # largest magnitude, of V.
    jacobian = values.deviation(w.grown, block.out).div_(w.total)
    carried = torch.bmm(w.upper, values.size).div_(w.total)
    if bool(w.hopeless.any()):
        for averaged in (jacobian, carried):
            averaged.masked_fill_(w.hopeless, torch.inf)
    torch.minimum(jacobian, values.spread, out=jacobian)
    torch.minimum(carried, values.most, out=carried)
    lost = _lost(block, a, w, values, full, carried)
    if a.leads and a.normalised:  # what is flushed before the division
        lost = lost + (2 * TINY + a.vanishing) * w.growth * w.lead * w.keys * values.most
    # else the roundings of P are those of the weights alone
    probability = a.probability_roundoff * a.rounds_apart
    sums = Sums(jacobian, carried, probability, lost, lost, size)
    pre, exact, rounding = before_output(block, values, a, problem, w, sums)
    row_sum = -torch.expm1(-w.normaliser)
    out = out_bound(size, pre, a.output, problem.scaled_output)
    # but where a weight may overflow, whose product with 0 is NaN
    if exact is not None:
        out = out.masked_fill(exact, 0.0)
    log_sum = log_sum_of(block, a, problem, w)
    unseen = _unseen_overflows(block, a, problem)
    beyond = _overflows(block, a, problem) | unseen
    unlogged = beyond
    if w.integers is not None:
        beyond = beyond | w.integers.beyond
        unlogged = beyond | w.integers.lse_beyond
    reached = (
        carried * (1 + rounding) * a.probability_scale / (1 - row_sum)
        if a.normalised
        else values.most
    )
    if a.columns is not None:
        reached = torch.full_like(reached, a.columns.top)
        tiny = (block.value_sizes.most > 0) & (block.value_sizes.most < TINY_ROW)
        out = out.masked_fill(tiny, torch.inf)
    if a.conversion is not None:
        reached = reached * (1 + a.conversion.roundoff)
        # A key that no row sees adds 0 times infinity.
        out = out.masked_fill(block.value_sizes.most >= a.conversion.limit, torch.inf)
    unweighted, unsummed = _spoiled(a, w, problem)
    lost_rows = beyond | unweighted | unsummed
    if _may_exceed(reached / a.least_factors[1], a, w, problem):
        lost_rows = lost_rows | _exceeds(reached / a.least_factors[1], a, w, problem)
    if bool(lost_rows.any()):
        out = out.masked_fill(lost_rows, torch.inf)
    settled = w.empty & ~unseen  # but where NaN may come of a masked score
    out = out.masked_fill(settled, 0.0) if bool(settled.any()) else out
    out = out.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    lse, reach = log_sum.where(unlogged | unsummed, settled, w.empty)
    if not a.ordered:
        return ForwardBound(out, lse, lse_reach=reach)
    if known is None:
        return ForwardBound(out, lse, lattice(block.out, pre, out), reach)
    carried = carried * (1 + a.probability_roundoff) + lost
    sums = Sums(known.moved, carried, 0.0, torch.zeros_like(lost), lost, known.middle.abs())
    sharp = before_output(block, values, a, problem, w, sums)[0]
    return ForwardBound(out, lse, interval_of(known, sharp, block.out, out, pre), reach)


def _may_exceed(values: Tensor, a: ForwardArithmetic, w: Weights, problem: Problem) -> bool:
    """Whether `_exceeds` can hold anywhere: it is asked of the largest of everything first."""
    if not values.numel():
        return False
    most = values.amax()
    if not a.normalised:
        most = most * w.keys.amax() * w.growth.amax() * a.reach
    limit = FP32_MAX
    if a.values.accumulator != "float32":
        limit = min(limit, a.values.domain(problem.seqlen_kv))
    return not bool(most * (1 + 2.0**-40) < limit)  # False for a NaN


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
    if a.sums_rounded:
        unsummed = unsummed | rounded
    if a.sums_by_unit:
        unsummed = unsummed | _exceeds(torch.ones_like(w.keys), a, w, problem)
    return rounded, unsummed


def _lost(
    block: RowBlock, a: ForwardArithmetic, w: Weights, values: Values, full: bool, carried: Tensor
) -> Tensor:
    """What O may lose because small P are rounded absolutely or flushed: no more of any weight than
    it may be, and so no more than `carried`, the average of |V|."""
    most, cut = loss_of(a) * w.share * w.total, w.upper
    if not cut.shape[-1]:
        return torch.zeros_like(block.out)
    if a.vanishing:
        cut = cut.fill_(torch.inf)  # no result need be so small as a weight
    elif bool(w.hopeless.any()):
        cut = cut.masked_fill(w.hopeless, torch.inf)
    if full and bool(((cut.amin(-1, keepdim=True) if w.least is None else w.least) >= most).all()):
        lost = most / w.total * values.size.sum(1, keepdim=True)
    else:
        each = torch.minimum(cut, most, out=w.upper)
        lost = torch.bmm(each if full else each.mul_(block.visible), values.size) / w.total
    return lost if a.vanishing else torch.minimum(lost, carried)


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
    return beyond | (largest * grown(a, problem) >= FP32_MAX * _LN_2)


def _unseen_overflows(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """The same where `RowBlock.magnitude` does not tell: sums under a scale of 0, scores that are
    masked after they were computed, operands that the scale has multiplied.

    A masked score of +inf to which a mask of -inf is added is NaN, and so is 0 times infinity.
    """
    queries, keys = block.query_sizes.most, block.key_sizes.most
    factor, growth = abs(problem.scale) / _LN_2, grown(a, problem)
    beyond = torch.full_like(queries, scale_overflows(a, problem), dtype=torch.bool)
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
