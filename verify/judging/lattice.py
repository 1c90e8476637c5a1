"""Judge a stored result against where it lay before it was rounded (docs/tolerance-backward.md,
*Lattice*)."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import cast
from verify.judging.comparison import spacing


def explained(got: Tensor, middle: Tensor, reach: Tensor, output: DType) -> Tensor:
    """How far from the middle a number must lie that rounds to the stored one, as a part of how far
    it may: at most 1 where some number within `reach` (fp64, +inf where nothing is asked) of
    `middle` rounds to it.

    got: raw output, any dtype, that holds numbers of `output`.  Rounding is to nearest, a tie to
    either side.  +inf for a NaN, and for any other number where `reach` is 0.
    """
    value = got.double()
    inward, outward = _half_places(value.abs(), output)
    # where the stored number is positive
    turned = torch.where(value < 0, -middle, middle)
    size = value.abs()
    least = torch.where(size == torch.inf, output.overflow, size - inward)
    off = torch.maximum(least - turned, turned - (size + outward)).clamp_(min=0.0)
    ratio = torch.where(off == 0, 0.0, off / reach)
    ratio = torch.where(value.isnan(), torch.inf, ratio)
    return torch.where(reach == torch.inf, 0.0, ratio)


def acceptable(middle: Tensor, reach: Tensor, output: DType) -> Tensor:
    """How many stored numbers are accepted, int64; 0 where nothing is asked.  -0 and 0 count as
    one."""
    asked = reach.isfinite()
    ends = [
        _index(cast(torch.where(asked, middle + side * reach, 0.0).numpy(), output), output)
        for side in (-1, 1)
    ]
    return torch.where(asked, ends[1] - ends[0] + 1, 0)


def _half_places(size: Tensor, output: DType) -> tuple[Tensor, Tensor]:
    """Half the distances of numbers of that format to their neighbours, towards 0 and away."""
    size = torch.where(size.isfinite(), size, 0.0)
    half = spacing(size, output) / 2
    shorter = (size > 2.0**output.emin) & (torch.frexp(size).mantissa == 0.5)
    return torch.where(shorter, half / 2, half), half


def _index(x: Tensor, output: DType) -> Tensor:
    """The place of a number among all of its format."""
    bits = x.view(torch.int16 if output.itemsize == 2 else torch.int32).long()
    magnitude = bits & (2 ** (8 * output.itemsize - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
