"""The float formats in which Triton's interpreter keeps values, and exact conversions from and to
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.arithmetic.dtypes import DTYPES, DType

Array = NDArray[Any]


@dataclass(frozen=True)
class _Encoding:
    """The bits of a float format: sign, exponent, fraction.  `beyond` encodes values above
    `max`."""

    format: DType
    storage: str  # the numpy dtype that the interpreter keeps it in
    saturates: bool
    nan: int  # the NaN that hardware writes

    @property
    def bits(self) -> str:
        return f"uint{8 * self.format.itemsize}"

    @property
    def largest(self) -> int:
        return int(_magnitude_bits(np.array([self.format.max]), self.format, np.rint)[0])

    @property
    def beyond(self) -> int:
        return self.largest if self.saturates else self.largest + 1


def _encoding(name: str, storage: str, *, saturates: bool = False, nan: int) -> _Encoding:
    return _Encoding(DTYPES[name], storage, saturates, nan)


# Triton's name of a dtype -> its encoding.
ENCODINGS = {
    "fp64": _encoding("float64", "float64", nan=0x7FFF_FFFF_FFFF_FFFF),
    "fp32": _encoding("float32", "float32", nan=0x7FFF_FFFF),
    "fp16": _encoding("float16", "float16", nan=0x7FFF),
    "bf16": _encoding("bfloat16", "uint16", nan=0x7FFF),
    "fp8e4nv": _encoding("float8_e4m3fn", "uint8", saturates=True, nan=0x7F),
    "fp8e5": _encoding("float8_e5m2", "uint8", saturates=True, nan=0x7F),
}
PACKED = ("bf16", "fp8e4nv", "fp8e5")  # kept as integers


def _magnitude_bits(magnitude: Array, format: DType, rounding: Callable[[Array], Array]) -> Array:
    """The bits of finite magnitudes (float64).  They count the format's numbers, whose spacing at
    exponent e is 2**(e - p + 1)."""
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude == 0, format.emin, np.maximum(exponent - 1, format.emin)).astype(
        np.int64
    )
    count = rounding(
        np.ldexp(magnitude, (format.precision - 1 - exponent).astype(np.int32))
    ).astype(np.int64)
    return np.asarray(count + ((exponent - format.emin) << (format.precision - 1)))


def encode(values: Array, dtype: str, *, toward_zero: bool = False) -> Array:
    """Round floats or integers to a format; returns the interpreter's storage of it.

    dtype: triton's name of the format ("bf16", "fp8e4nv", ...).  It rounds once, to nearest, ties
    to even, or toward zero; every step before is exact for floats up to float64.
    """
    encoding = ENCODINGS[dtype]
    if dtype == "bf16" and values.dtype == np.float32 and not toward_zero:
        return _upper_halves(values)
    with np.errstate(all="ignore"):
        if dtype not in PACKED and not toward_zero:
            return values.astype(encoding.storage)  # numpy's own floats round to nearest
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        bits = _magnitude_bits(
            np.abs(np.where(finite, wide, 0.0)),
            encoding.format,
            np.trunc if toward_zero else np.rint,
        )
    too_large = encoding.largest if toward_zero else encoding.beyond
    bits = np.where(bits > encoding.largest, too_large, bits)
    bits = np.where(finite, bits, encoding.beyond) | np.where(
        np.signbit(wide), 1 << (8 * encoding.format.itemsize - 1), 0
    )
    bits = np.where(np.isnan(wide), encoding.nan, bits)
    return bits.astype(encoding.bits).view(encoding.storage)


def _upper_halves(values: Array) -> Array:
    """fp32 to the nearest bf16, as uint16.  Both have the same exponents: a carry moves into the
    upper half."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = np.uint32(ENCODINGS["bf16"].nan)
    return np.where(np.isnan(values), nan, rounded.reshape(values.shape)).astype(np.uint16)


@functools.cache
def _values_of_all_bits(dtype: str) -> Array:
    """The value of each 8-bit pattern, as fp32."""
    format = ENCODINGS[dtype].format
    bits = np.arange(256)
    exponent, fraction = (
        (bits & 0x7F) >> (format.precision - 1),
        bits & ((1 << (format.precision - 1)) - 1),
    )
    hidden = np.where(exponent > 0, 1 << (format.precision - 1), 0)
    shift = np.maximum(exponent, 1) - 1 + format.emin - (format.precision - 1)
    values = np.ldexp((hidden + fraction).astype(np.float64), shift.astype(np.int32))
    if dtype == "fp8e5":  # all ones in the exponent: infinity and NaN, as in IEEE 754
        values[exponent == 0x1F] = np.where(fraction[exponent == 0x1F] == 0, np.inf, np.nan)
    else:  # e4m3 has no infinity and one NaN of each sign
        values[(bits & 0x7F) == 0x7F] = np.nan
    return np.asarray(np.where(bits < 0x80, values, -values), np.float32)


def decode(data: Array, dtype: str) -> Array:
    """The exact values of the interpreter's storage of a format: packed formats as fp32, the others
    unchanged."""
    if dtype == "bf16":
        return np.asarray((data.astype(np.uint32) << 16).view(np.float32))
    return np.asarray(_values_of_all_bits(dtype)[data]) if dtype in PACKED else data
