"""What P and dS are once they are rounded: one known number, but where two are near a tie.

The derivation is docs/tolerance-backward.md, *Known roundings*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.tolerance.arithmetic import TINY, U, relative
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.scratch import Room


@dataclass(frozen=True, eq=False)
class Known:
    """Where a weight lies when it enters its product, fp64 (heads, rows, keys): within `half` of
    `middle`."""

    middle: Tensor
    half: Tensor


def rounded_to(
    dtype: DType, nominal: Tensor, error: Tensor, room: Room, a: GradientArithmetic | None = None
) -> Known:
    """Where a number lies after its cast, which was within `error` of `nominal` before.

    Rounding to nearest is monotone, so it lies between what the two ends round to.  The ends are
    moved by what may be flushed before the cast or by it.  a: of a dS, that the declared roundings
    of every term and a scale may have multiplied before.
    """
    wide, factor = torch.abs(nominal, out=room.take()).add_(error), 1.0 if a is None else a.factor
    flushed = torch.clamp(wide, max=2 * TINY / min(factor, 1.0), out=room.take())
    if a is None:
        torch.add(error, flushed, out=wide)
    else:
        wide.mul_(relative(a.gradient_roundings + 1, U)).add_(error).add_(flushed)
    if dtype.precision >= 24:
        return Known(flushed.copy_(nominal), wide)
    low = torch.sub(nominal, wide, out=flushed)
    high = wide.add_(nominal)
    if factor != 1.0:
        low.mul_(factor)
        high.mul_(factor)
    # By way of fp32, which is what a kernel casts: that is monotone, too, and no number of fp32
    # changes.
    low.copy_(cast_to(low, dtype))
    high.copy_(cast_to(high, dtype))
    middle = torch.add(low, high, out=room.take())
    return Known(middle.mul_(0.5 / factor), high.sub_(low).mul_(0.5 / factor))


def cast_to(x: Tensor, dtype: DType) -> Tensor:
    """fp64 rounded to nearest by way of fp32, as torch does it, but faster."""
    return x.to(torch.float32).to(dtype.torch) if dtype.name == "bfloat16" else x.to(dtype.torch)


def settled(known: Known, nominal: Tensor, error: Tensor, hidden: Tensor | None) -> Known:
    """The same, where a pair is hidden or nothing is asked as if no rounding were known.

    error: around `nominal`, casts included; 0 or infinite where hidden.
    """
    if hidden is not None:
        known.middle.masked_fill_(hidden, 0.0)
        torch.where(hidden, error, known.half, out=known.half)
    largest = known.half.amax() + error.amax() if error.numel() else 0.0
    if not largest < math.inf:  # NaN, too: infinity less infinity
        unasked = ~(known.half.isfinite() & error.isfinite())
        torch.where(unasked, nominal, known.middle, out=known.middle)
        known.half.masked_fill_(unasked, torch.inf)
    return known
