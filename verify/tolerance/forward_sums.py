"""From the errors of weights to that of O before its last rounding: products, row sum, division.

The derivation is docs/tolerance.md, *O*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, Columns, ForwardArithmetic, U, relative
from verify.tolerance.averages import Values
from verify.tolerance.exact_sums import ExactUnit
from verify.tolerance.extremes import above
from verify.tolerance.partial_sums import saved
from verify.tolerance.subnormals import Lost
from verify.tolerance.weights import Weights, accumulator_loss, loss_of


@dataclass(frozen=True, eq=False)
class Sums:
    """Errors of a sum of P V and of what it is summed of, all (heads, rows, head_dim_v).

    moved: what it is off before the roundings of the product.  carried: the sum of magnitudes;
    probability: roundoff of P that is not in `moved`, and lost, what P loses absolutely; small: the
    same whether that is in `moved` or not.  size: of the result.
    """

    moved: Tensor
    carried: Tensor
    probability: float
    lost: Tensor
    small: Tensor
    size: Tensor


def before_output(
    block: RowBlock, values: Values, a: ForwardArithmetic, problem: Problem, w: Weights, sums: Sums
) -> tuple[Tensor, Tensor | None, Tensor]:
    """How far O may be off before its last rounding; where it is exactly 0, None for nowhere; the
    roundings of the products and P."""
    carried = sums.carried
    lost = sums.lost
    size = sums.size
    rounding, of_sums, fp32 = _roundings(a, w, problem, sums.probability)
    row_sum = -torch.expm1(-w.normaliser)
    if a.conversion is not None:
        rounding = (1 + rounding) * (1 + a.conversion.roundoff) - 1
        lost = lost * (1 + a.conversion.roundoff)
        least = block.value_sizes.least < a.conversion.normal
        share = 1 + rounding + w.keys * w.share * loss_of(a)
        lost = lost + a.conversion.lost * share * least
    factor: Tensor | float = 1.0
    if a.columns is not None:
        factor = column_factors(block, a.columns)
        rounding = (1 + rounding) * (1 + _column_roundoff(a.columns)) - 1
        share = 1 + rounding + w.keys * w.share * loss_of(a)
        least = block.value_sizes.least < 2.0**a.columns.format.emin * factor
        half = a.columns.format.smallest_subnormal / 2
        lost = lost * (1 + _column_roundoff(a.columns)) + half * factor * share * least
    if a.weighted.threshold:
        alone = w.keys * w.share * loss_of(a)
        small = block.value_sizes.least < a.weighted.threshold * factor
        of_p = Lost(sums.small / factor, alone)
        some = small if bool(small.any()) else False
        cut = a.weighted.loss(w.keys, 1.0, carried / factor, of_p, some)
        lost = lost + (1 + fp32) * factor * cut
    rounding, lost = _of_parts(a, rounding, lost, carried, values.most / (1 - row_sum))
    pre = torch.add(size, sums.moved)
    pre = saved(of_sums, carried, pre).neg_().add_(lost).add_(sums.moved)
    spare = torch.mul(carried, rounding)
    pre.add_(spare).add_(torch.mul(size, row_sum, out=spare)).div_(1 - row_sum)
    # An O of 0 to within 0: nearly always there is none.
    exact = None if above(pre, 0.0) else size + pre == 0
    last = (0 if a.normalised else a.division) + a.output_roundings
    if last:
        pre.mul_(1 + relative(last, U)).add_(size, alpha=relative(last, U))
    flushed = (
        w.growth
        * (2 * w.keys + a.between_blocks + 2 + a.output_roundings)
        * (TINY * a.largest_factor)
    )
    flushed = flushed * w.lead + a.values.flush
    pre.add_(flushed + w.share * (accumulator_loss(a, problem) * a.largest_factor))
    return pre, exact, rounding


def column_factors(block: RowBlock, columns: Columns) -> Tensor:
    """The factor of each column of V, the largest possible one; 1 where all V are 0, (heads, 1,
    head_dim_v)."""
    most = block.value_sizes.most
    return torch.where(most == 0, 1.0, most / columns.top * (1 + relative(4, U)))


def _column_roundoff(columns: Columns) -> float:
    """Of V as it is rounded, of its quotient and its factor in fp32, and of the product with it."""
    return (1 + columns.format.unit_roundoff) * (1 + relative(6, U)) - 1


def _roundings(
    a: ForwardArithmetic, w: Weights, problem: Problem, probability: float
) -> tuple[Tensor, Tensor | float, float]:
    """What the sum of magnitudes is multiplied by for the roundings of P, the product and its
    rescales; the part of it that is relative to partial sums; and the roundings in fp32 alone."""
    of_sizes, of_sums = a.values.splits(w.summed, problem.seqlen_kv)
    # Rescales, sums of blocks; a division of P; products and sums of a merge.
    exact = isinstance(a.values, ExactUnit)
    between = 0.0 if exact else relative(a.between_blocks, U)
    if a.narrow and not exact:
        between = relative(3 * (a.blocks + a.parts), a.narrow.unit_roundoff)
    others = relative(a.division * a.normalised + (a.blocks + 2) * a.merged, U)
    fp32 = (1 + between) * (1 + others) - 1
    rounding = (1 + probability) * (1 + of_sizes + of_sums) * (1 + fp32) - 1
    if a.saturates and a.rounds_apart:
        rounding = rounding + (1 - a.saturates / w.lift).clamp(min=0.0)
    # The parts of a merge may add up to all magnitudes.
    return rounding, 0.0 if a.merged else (1 + of_sums) * (1 + between) - 1, fp32


def _of_parts(
    a: ForwardArithmetic, rounding: Tensor, lost: Tensor, carried: Tensor, most: Tensor
) -> tuple[Tensor, Tensor]:
    """The roundings and the absolute loss, where the O of each part of the keys is rounded to 16
    bits; most: what such an O reaches, but for `rounding`.

    The merge is an average of the parts.  Their roundings move it by at most u of the average of
    |V|, and by half of the smallest subnormal unless V = 0.  A part whose V is large can overflow.
    """
    if a.partial is None:
        return rounding, lost
    more = (1 + rounding) * (1 + a.partial.unit_roundoff) - 1
    absolute = (carried > 0) * (a.partial.smallest_subnormal / 2)
    lost = lost * (1 + a.partial.unit_roundoff) + absolute * (1 + rounding)
    return more, lost.masked_fill(most * (1 + rounding) >= a.partial.overflow, torch.inf)
