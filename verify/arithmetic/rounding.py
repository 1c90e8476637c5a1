"""Rounding to a format: by integers, the same bits on every machine; and by torch, fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named

Floats = NDArray[np.float64]


def cast(values: Floats | Tensor, dtype: DType) -> Tensor:
    """Round float64 values to `dtype`, to nearest, ties to even, subnormals kept: a tensor of the
    same shape, contiguous, on the device of the values.

    What is at least half a unit in the last place above the largest finite number becomes infinity,
    as IEEE 754 has it, or NaN in float8_e4m3fn, which has no infinity; nothing saturates.  At
    exactly half, the tie goes to the even neighbour: infinity for the IEEE formats, 448 for
    float8_e4m3fn.  A NaN becomes the positive quiet NaN; float64 is left as it is.
    """
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.require(values, np.float64, ("C", "W")))
    if dtype.itemsize == 8:
        return values.clone(memory_format=torch.contiguous_format)
    # Strides of dimensions of size 1 can be anything.
    source = values.contiguous().as_strided((values.numel(),), (1,))
    result = torch.empty(source.shape, dtype=_INTEGERS[dtype.itemsize], device=source.device)
    # On a CPU, what fits a core's cache with its temporaries.
    step = 1 << 15 if source.device.type == "cpu" else max(source.numel(), 1)
    encoding = _encoding(dtype)
    for part, rounded in zip(torch.split(source, step), torch.split(result, step), strict=True):
        _round_bits(part, encoding, rounded)
    return result.view(dtype.torch).view(values.shape)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MAGNITUDE = (1 << 63) - 1
_INFINITY = 0x7FF << 52
_TOP = -1 if sys.byteorder == "little" else 0


@dataclass(frozen=True)
class _Encoding:
    """Constants of rounding to a format: those of float64's bit patterns, then those of its own.

    shift: fraction bits that float64 has more.  smallest, highest: bits of the smallest normal and
    of the largest finite number.  up: what rounds to nearest, less the difference of the exponents'
    biases.  anchor: a number whose unit in the last place is the format's smallest subnormal, and
    `anchored` its bits.  past, quiet: the pattern after the largest finite number's, and NaN's.
    sign: the sign bit.
    """

    shift: int
    smallest: int
    highest: int
    up: int
    anchor: float
    anchored: int
    past: int
    quiet: int
    words: int
    sign: int


@cache
def _encoding(dtype: DType) -> _Encoding:
    fraction_bits = dtype.precision - 1
    fraction, exponent = math.frexp(dtype.max)
    past = ((exponent - dtype.emin) << fraction_bits) + 1
    past += int(math.ldexp(2 * fraction - 1, fraction_bits))
    shift = 52 - fraction_bits
    anchor = math.ldexp(dtype.smallest_subnormal, 52)
    return _Encoding(
        shift=shift,
        smallest=(1023 + dtype.emin) << 52,
        highest=_bits(dtype.max),
        up=(1 << (shift - 1)) - 1 - ((1022 + dtype.emin) << 52),
        anchor=anchor,
        anchored=_bits(anchor),
        past=past,
        quiet=past + (1 << (fraction_bits - 1)) * dtype.has_infinity,
        words=8 // dtype.itemsize,
        sign=torch.iinfo(_INTEGERS[dtype.itemsize]).min,
    )


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def seen_range(magnitude: Tensor) -> tuple[int, int]:
    """The least and the largest element; where that would wait for a device, of any tensor."""
    if magnitude.device.type != "cpu" or not magnitude.numel():
        return 0, _MAGNITUDE
    least, most = torch.aminmax(magnitude)
    return int(least), int(most)


def _round_bits(values: Tensor, encoding: _Encoding, rounded: Tensor) -> None:
    """Write the bit patterns of float64 values in a format into `rounded`, integers of its size.

    What no value needs is left out on a CPU, which can see that for less than it costs.
    """
    magnitude = values.view(torch.int64) & _MAGNITUDE
    least, most = seen_range(magnitude)
    # Of normal numbers, as if exponents had no end: a carry raises the exponent.
    found = (magnitude >> encoding.shift).bitwise_and_(1).add_(magnitude).add_(encoding.up)
    found.bitwise_right_shift_(encoding.shift)
    if least < encoding.smallest:
        # A sum with the anchor is rounded to a multiple of the smallest subnormal number; the
        # multiple is by how much its bits have grown.
        tiny = (magnitude.view(torch.float64) + encoding.anchor).view(torch.int64)
        tiny -= encoding.anchored
        found = torch.where(magnitude < encoding.smallest, tiny, found)
    if most > encoding.highest:
        found.clamp_(max=encoding.past)
    words = values.view(rounded.dtype).view(values.numel(), encoding.words)
    sign = words[:, _TOP] & encoding.sign  # the first bit of both
    if most > _INFINITY:
        nan = magnitude > _INFINITY
        found.masked_fill_(nan, encoding.quiet)
        sign.masked_fill_(nan, 0)
    torch.bitwise_or(found.to(rounded.dtype), sign, out=rounded)


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in fp64, exactly; exponents: integers of any shape within -1022..1023."""
    return (exponent.to(torch.int64) + 1023).bitwise_left_shift_(52).view(torch.float64)


def nearest(x: Tensor, dtype: DType) -> Tensor:
    """fp64 rounded to a format of 16 or 32 bits as `cast` does it, by torch on the tensor's device,
    but for the sign of a zero; a NaN stays one."""
    if dtype.itemsize == 4:
        return x.to(torch.float32)
    # To a multiple of the last place, by a sum whose last bit has that place; then exactly.
    _, emax = math.frexp(dtype.max)
    exponent = torch.frexp(x).exponent.clamp_(dtype.emin + 1, emax + 1)
    big = power_of_two(exponent + (52 - dtype.precision)).mul_(1.5)
    rounded = torch.add(x, big).sub_(big).to(torch.float32)
    return rounded.to(dtype.torch)


def to_format(name: str) -> Callable[[Tensor], Tensor]:
    """Rounding to nearest of fp64 values to a format, by torch, back in fp64; 8-bit formats
    saturate."""
    found = dtype_named(name)
    if found.itemsize == 1:
        return lambda x: x.clamp(-found.max, found.max).float().to(found.torch).double()
    return lambda x: x.to(found.torch).double()


def to_bits(precision: int, *, truncate: bool = False) -> Callable[[Tensor], Tensor]:
    """Rounding of fp64 values to so many significant bits, to nearest or toward zero, without
    limits of range."""

    def rounded(x: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(x)
        scaled = torch.ldexp(fraction, torch.tensor(precision))
        kept = scaled.trunc() if truncate else scaled.round()
        return torch.ldexp(kept, exponent - precision)

    return rounded
