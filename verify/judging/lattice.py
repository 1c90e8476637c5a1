"""Judge a stored result against where it lay before it was rounded (docs/tolerance-backward.md,
*Lattice*)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import nearest, power_of_two
from verify.tolerance.extremes import below
from verify.tolerance.intervals import Interval


def explained(got: Tensor, middle: Tensor, reach: Tensor, output: DType) -> Tensor:
    """How far from the middle a number must lie that rounds to the stored one, as a part of how far
    it may: at most 1 where some number within `reach` (fp64, +inf where nothing is asked) of
    `middle` rounds to it.

    got: raw output, any dtype, that holds numbers of `output`.  Rounding is to nearest, a tie to
    either side.  +inf for a NaN, and for any other number where `reach` is 0.
    """
    value = got.double()
    size = value.abs()
    inward, outward = _half_places(size, output)
    # where the stored number is positive; either side of zero is as far away
    turned = torch.copysign(torch.ones((), dtype=torch.float64, device=value.device), value)
    turned.mul_(middle)
    ordinary = below(size, torch.inf)
    off = size - inward
    if not ordinary:
        off.masked_fill_(size == torch.inf, output.overflow)
    off.sub_(turned)
    torch.maximum(off, turned.sub_(outward.add_(size)), out=off).clamp_(min=0.0)
    if ordinary and below(off, torch.inf) and not bool(reach.isnan().any()):
        # 0 / 0 is 0, and nothing is asked where `reach` is infinite.
        return off.div_(reach).nan_to_num_(nan=0.0, posinf=torch.inf)
    ratio = torch.where(off == 0, 0.0, off / reach)
    ratio = torch.where(value.isnan(), torch.inf, ratio)
    return torch.where(reach == torch.inf, 0.0, ratio)


@dataclass(frozen=True)
class Explained:
    """What one tensor of a case needs of how far it may lie from the middle, elementwise; the
    largest; of how many elements something is asked; and for how many of these one stored number
    alone is accepted."""

    ratio: Tensor
    largest: float
    asked: int
    single: int

    def measures(self, name: str) -> dict[str, float]:
        """`lattice`, and `single` if anything is asked, named after the tensor."""
        found = {f"lattice_{name}": self.largest}
        if self.asked:
            found[f"single_{name}"] = self.single / self.asked
        return found


def explanations(
    got: Tensor, span: Interval, output: DType, cases: int, hidden: Tensor | None = None
) -> list[Explained]:
    """Of each of so many cases whose tensors, not empty, are stacked along the batch.

    span: where the numbers lie before their last rounding; hidden: elements that are not asked,
    bool, broadcastable.
    """
    ratio = explained(got, span.middle, span.reach, output)
    count = acceptable(span.middle, span.reach, output)
    if hidden is not None and bool(hidden.any()):
        ratio.masked_fill_(hidden, 0.0)
        count.masked_fill_(hidden, 0)
    count, largest = count.reshape(cases, -1), ratio.reshape(cases, -1).amax(1)
    numbers = torch.stack([largest, *((x.sum(1).double()) for x in (count > 0, count == 1))], 1)
    parts = ratio.reshape(cases, -1, *ratio.shape[1:])
    return [
        Explained(own, most, int(asked), int(single))
        for own, (most, asked, single) in zip(parts, numbers.tolist(), strict=True)
    ]


def acceptable(middle: Tensor, reach: Tensor, output: DType) -> Tensor:
    """How many stored numbers are accepted, int64; 0 where nothing is asked.  -0 and 0 count as
    one."""
    low, high = (_index(nearest(end, output), output) for end in (middle - reach, middle + reach))
    count = high.sub_(low).add_(1)
    return count if below(reach, torch.inf) else count.masked_fill_(~reach.isfinite(), 0)


def _half_places(size: Tensor, output: DType) -> tuple[Tensor, Tensor]:
    """Half the distances of numbers of that format to their neighbours, towards 0 and away; of a
    NaN or an infinity as if it were 0."""
    if not below(size, torch.inf):
        size = torch.where(size.isfinite(), size, 0.0)
    size = size.clamp(min=2.0**output.emin)
    mantissa, exponent = torch.frexp(size)
    half = power_of_two(exponent - (output.precision + 1))
    shorter = (mantissa == 0.5).logical_and_(size > 2.0**output.emin)
    return half * (1 - shorter * 0.5), half


def _index(x: Tensor, output: DType) -> Tensor:
    """The place of a number among all of its format."""
    bits = x.view(torch.int16 if output.itemsize == 2 else torch.int32).long()
    sign = bits >> 63  # -1 or 0
    magnitude = bits.bitwise_and_(2 ** (8 * output.itemsize - 1) - 1)
    return magnitude.bitwise_xor_(sign).sub_(sign)
