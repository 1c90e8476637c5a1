"""What P is in a forward once it is rounded: one known number, but where two are near a tie; and
the sum of P V that follows.

The derivation is docs/tolerance.md, *Known roundings*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, ForwardArithmetic, U
from verify.tolerance.averages import Values
from verify.tolerance.forward_maxima import Maxima, maxima_of, scale_blocks
from verify.tolerance.gradients_known import Known, rounded_to
from verify.tolerance.intervals import Interval
from verify.tolerance.scratch import Room
from verify.tolerance.weights import LARGE, Weights, loss_of

_FURTHEST = 700.0  # e^-700 is nothing beside what is flushed


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
        known = _around(a, block.probabilities, w.upper, more, room)
        summed = rescaled = torch.zeros_like(summed)
    else:
        maxima = maxima_of(block, a, problem, w.error)
        known = _unnormalised(block, a, w, maxima, room)
        if maxima.unknown is not None:
            known = _with_unknown(block, a, w, known, (maxima.unknown, summed))
        rescaled = (w.error + 2 * w.largest if a.merged else w.rescaled).clamp(max=LARGE)
    middle = torch.bmm(known.middle, values.values)
    far, common = torch.expm1(rescaled), torch.expm1(summed)
    reach = known.half.mul_(1 + far).add_(known.middle.abs_().mul_(far)).mul_(1 + common)
    return KnownSum(middle, _at_most(reach, values).addcmul_(middle.abs(), common))


def _at_most(weights: Tensor, values: Values) -> Tensor:
    """An upper bound of the sum of weights times |V|, computed in fp32, which takes half the time;
    infinite or NaN where that overflows."""
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
    reach = (reach + TINY).masked_fill(out == 0, 0.0)  # a small result is flushed
    unasked = out.isinf() | ~reach.isfinite() | ~middle.isfinite()
    return Interval(middle.masked_fill(unasked, 0.0), reach.masked_fill(unasked, torch.inf))


def _around(
    a: ForwardArithmetic, nominal: Tensor, upper: Tensor, more: Tensor | float, room: Room
) -> Known:
    """Where numbers lie after their cast that were within e^more upper - nominal of nominal."""
    factor = more.exp() if isinstance(more, Tensor) else more
    error = torch.mul(upper, factor, out=room.take()).sub_(nominal).clamp_(min=0.0)
    return rounded_to(a.probability, nominal, error, room)


def _unnormalised(
    block: RowBlock, a: ForwardArithmetic, w: Weights, maxima: Maxima, room: Room
) -> Known:
    """Of p~, relative to the maxima, as parts of the row's sum."""
    distance = (block.lse[..., None] - maxima.used).nan_to_num(0.0, 0.0, 0.0).clamp(max=_FURTHEST)
    part = torch.exp(-distance)  # G
    nominal = scale_blocks(block.probabilities, 1 / part, a.block_n, room.take())
    upper = scale_blocks(w.upper, 1 / part, a.block_n, room.take())
    known = _around(a, nominal, upper, w.error - a.rescales, room)
    for each in (known.middle, known.half):
        scale_blocks(each, part, a.block_n, each)
    return known


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
