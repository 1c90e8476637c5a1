"""Rounding to a format: by integers, the same bits on every machine; and by torch, fast."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named

Floats = NDArray[np.float64]


def cast(values: Floats, dtype: DType) -> Tensor:
    """Round float64 values to `dtype`, to nearest, ties to even, subnormals kept: a tensor of the
    same shape.

    What is at least half a unit in the last place above the largest finite number becomes infinity,
    as IEEE 754 has it, or NaN in float8_e4m3fn, which has no infinity; nothing saturates.  At
    exactly half, the tie goes to the even neighbour: infinity for the IEEE formats, 448 for
    float8_e4m3fn.  A NaN becomes the positive quiet NaN; float64 is left as it is.
    """
    source = np.ascontiguousarray(values, dtype=np.float64).reshape(-1).view(np.uint64)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    result = np.empty(source.shape, dtype=unsigned)
    step = 1 << 14  # what fits a core's cache with its temporaries
    for start in range(0, source.size, step):
        result[start : start + step] = _round_bits(source[start : start + step], dtype)
    signed = torch.from_numpy(result.view(f"i{dtype.itemsize}"))
    return signed.view(dtype.torch).reshape(values.shape)


def _bits(value: int) -> np.uint64:
    return np.uint64(value)


def _round_bits(bits: NDArray[np.uint64], dtype: DType) -> NDArray[np.uint64]:
    """Bit patterns of float64 to bit patterns of `dtype`."""
    if dtype.itemsize == 8:
        return bits
    magnitude = bits & _bits((1 << 63) - 1)
    rounded = _rounded_normal(magnitude, dtype)
    tiny = np.flatnonzero(magnitude < _bits((1023 + dtype.emin) << 52))
    if tiny.size:
        rounded[tiny] = _rounded(magnitude[tiny], dtype)
    largest, quiet = _encoded_limits(dtype)
    np.copyto(rounded, _bits(largest + 1), where=rounded > _bits(largest))
    rounded |= (bits >> _bits(63)) << _bits(8 * dtype.itemsize - 1)
    np.copyto(rounded, _bits(quiet), where=magnitude > _bits(0x7FF << 52))
    return rounded


def _rounded(magnitude: NDArray[np.uint64], dtype: DType) -> NDArray[np.uint64]:
    """Magnitudes in bit patterns of `dtype`, as if its exponents had no end.

    A float64 is sig * 2**(e - 1075).  Its last kept place is 2**(max(e, least) - 1023 -
    fraction_bits), so the shift grows below the normal range; the rounded significand is added to
    the exponent field, and its carry does the rest.
    """
    fraction_bits = dtype.precision - 1
    least = _bits(1023 + dtype.emin)  # float64's exponent field of the smallest normal number
    field = magnitude >> _bits(52)
    significand = (magnitude & _bits((1 << 52) - 1)) | (
        (field > _bits(0)).astype(np.uint64) << _bits(52)
    )
    exponent = np.maximum(field, least)
    below = exponent - np.maximum(field, _bits(1))
    shift = np.minimum(below + _bits(52 - fraction_bits), _bits(62))
    tie = (_bits(1) << (shift - _bits(1))) - _bits(1) + ((significand >> shift) & _bits(1))
    rounded: NDArray[np.uint64] = (significand + tie) >> shift
    rounded += (exponent - least) << _bits(fraction_bits)
    return rounded


def _rounded_normal(magnitude: NDArray[np.uint64], dtype: DType) -> NDArray[np.uint64]:
    """The same of what is normal in `dtype`, as nearly all is: every shift is the same."""
    fraction_bits = dtype.precision - 1
    shift = 52 - fraction_bits
    rounded: NDArray[np.uint64] = (magnitude >> _bits(shift)) & _bits(1)
    rounded += magnitude
    rounded += _bits((1 << (shift - 1)) - 1)
    rounded >>= _bits(shift)
    rounded -= _bits((1022 + dtype.emin) << fraction_bits)
    return rounded


def _encoded_limits(dtype: DType) -> tuple[int, int]:
    """Bit patterns of the largest finite number and of the quiet NaN; the pattern after the largest
    is infinity or NaN."""
    fraction_bits = dtype.precision - 1
    fraction, exponent = math.frexp(dtype.max)
    largest = ((exponent - dtype.emin) << fraction_bits) + int(
        math.ldexp(2 * fraction - 1, fraction_bits)
    )
    return largest, largest + 1 + (1 << (fraction_bits - 1)) * dtype.has_infinity


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
