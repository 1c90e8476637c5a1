"""What P is in a forward once it is rounded: one known number, but where two are near a tie; and
the sum of P V that follows.

The derivation is docs/tolerance.md, *Known roundings*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, ForwardArithmetic, U
from verify.tolerance.averages import Values
from verify.tolerance.extremes import above, below
from verify.tolerance.forward_maxima import maxima_of, scale_blocks
from verify.tolerance.gradients_known import Known, cast_to
from verify.tolerance.intervals import Interval
from verify.tolerance.scratch import Room
from verify.tolerance.weights import LARGE, Weights, loss_of

_FURTHEST = 700.0  # e^-700 is nothing beside what is flushed
# Keys of a block, and of a row, where products of blocks take little longer than one product.
_LEAST_BLOCK = 16
_MOST_KEYS = 2048


@dataclass(frozen=True, eq=False)
class KnownSum:
    """O of the numbers that P is, and how far a kernel's may be from it but for the roundings of
    the products and of what follows; both (heads, rows, head_dim_v)."""

    middle: Tensor
    moved: Tensor


def known_sum(
    block: RowBlock, values: Values, a: ForwardArithmetic, problem: Problem, w: Weights, room: Room
) -> KnownSum:
    """The sum of P V for a block of rows.  It reads `w` and changes nothing of it."""
    summed = torch.maximum(torch.log1p(w.moved), -torch.log(w.total)).clamp(max=LARGE)  # tau
    if a.normalised:
        more = summed + w.normaliser + (a.division + 1) * U
        known = _cast(a, block, w, torch.ones_like(more), more, room)
        summed = rescaled = torch.zeros_like(summed)
    else:
        maxima = maxima_of(block, a, problem, w.error)
        # What the row's sum is of p~: G.
        distance = block.lse[..., None] - maxima.used
        parts = torch.exp(-distance.nan_to_num(0.0, 0.0, 0.0).clamp(max=_FURTHEST))
        known = _cast(a, block, w, parts, w.error - a.rescales, room)
        if maxima.unknown is not None:
            known = _with_unknown(block, a, w, known, (maxima.unknown, summed))
        rescaled = (w.error + 2 * w.largest if a.merged else w.rescaled).clamp(max=LARGE)
    far, common = torch.expm1(rescaled), torch.expm1(summed)
    middle, of_blocks = _summed(known.middle, values.values, a.block_n)
    reach = known.half.mul_(1 + far)
    if of_blocks is None:
        reach.add_(known.middle.mul_(far))
    moved = _at_most(reach.mul_(1 + common), values).addcmul_(middle.abs(), common)
    if of_blocks is not None:
        moved.addcmul_(of_blocks, far * (1 + common))
    return KnownSum(middle, moved)


def _summed(weights: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """The sum of weights times V, and the sum of the sizes of its parts from each block of `size`
    keys (0: all); None for that where the parts would cost more than they are worth."""
    keys = weights.shape[-1]
    if not size or keys <= size:
        whole = torch.bmm(weights, values)
        return whole, whole.abs()
    if size < _LEAST_BLOCK or keys > _MOST_KEYS:
        return torch.bmm(weights, values), None
    total = values.new_zeros(*weights.shape[:2], values.shape[-1])
    sizes = torch.zeros_like(total)
    for start in range(0, keys, size):
        part = slice(start, start + size)
        made = torch.bmm(weights[..., part], values[:, part])
        total += made
        sizes += made.abs_()
    return total, sizes


def _at_most(weights: Tensor, values: Values) -> Tensor:
    """An upper bound of the sum of weights times |V|: on a CPU in fp32, which takes half the time;
    infinite or NaN where that overflows.  A GPU could multiply fp32 by tf32."""
    if weights.is_cuda:
        return torch.bmm(weights, values.size)
    keys = weights.shape[-1]
    sums = torch.bmm(weights.float(), values.size.float()).double()
    return sums.mul_(1 + (keys + 8) * U).add_(keys * 2 * TINY * (1 + values.most))


def interval_of(
    known: KnownSum, pre: Tensor, around: Tensor, out: Tensor, plain: Tensor
) -> Interval:
    """Where O lies before its last rounding.  pre: what a kernel's may be off `known.middle`;
    plain: what it may be off `around`, the exact O, whatever P is rounded to; out: its bound."""
    better = pre < plain  # False for a NaN
    middle, reach = torch.where(better, known.middle, around), torch.where(better, pre, plain)
    return lattice(middle, reach, out)


def lattice(middle: Tensor, reach: Tensor, out: Tensor) -> Interval:
    """The interval of an O that is within `reach` of `middle`; out: its bound, 0 where it must be
    exact and +inf where nothing is asked."""
    if above(out, 0.0) and below(out, torch.inf):
        reach = reach + TINY  # a small result is flushed
        if below(reach, torch.inf) and below(middle, torch.inf) and above(middle, -torch.inf):
            return Interval(middle, reach)
    else:
        reach = (reach + TINY).masked_fill(out == 0, 0.0)
    unasked = out.isinf() | ~reach.isfinite() | ~middle.isfinite()
    return Interval(middle.masked_fill(unasked, 0.0), reach.masked_fill(unasked, torch.inf))


def _cast(
    a: ForwardArithmetic,
    block: RowBlock,
    w: Weights,
    parts: Tensor,
    more: Tensor | float,
    room: Room,
) -> Known:
    """Where P lies after its cast, which is that of P / part before, within e^more upper - P of it;
    multiplied by the part again, and so a part of the row's sum.

    parts: (heads, rows, blocks).  Both ends are moved by what may be flushed; a masked P's, too,
    which is nothing beside what is counted for sums.
    """
    factor = more.exp() if isinstance(more, Tensor) else math.exp(more)
    high = scale_blocks(w.upper, factor / parts, a.block_n, room.take()).add_(2 * TINY)
    low = scale_blocks(block.probabilities, 2 / parts, a.block_n, room.take()).sub_(high)
    low.copy_(cast_to(low, a.probability))
    high.copy_(cast_to(high, a.probability))
    middle = torch.add(low, high, out=room.take())
    half = high.sub_(low)
    for each in (middle, half):
        scale_blocks(each, parts / 2, a.block_n, each)
    return Known(middle, half)


def _with_unknown(
    block: RowBlock,
    a: ForwardArithmetic,
    w: Weights,
    known: Known,
    unknown: tuple[Tensor, Tensor],
) -> Known:
    """The same with any rounding in the blocks whose maximum is not known; and what a row sum may
    be off."""
    where, summed = unknown
    keys = block.scores.shape[-1]
    pairs = where.repeat_interleave(a.block_n or keys, -1)[..., :keys]
    lost = torch.minimum(loss_of(a) * w.share * torch.exp(summed), w.upper)
    any_rounding = lost.add_(w.upper, alpha=1 + a.probability_roundoff).sub_(block.probabilities)
    return Known(
        torch.where(pairs, block.probabilities, known.middle),
        torch.where(pairs, any_rounding, known.half),
    )
