"""Number formats: precision, range and rounding unit of every dtype that a kernel may read, write
or cast to.

Sources: IEEE 754-2019 (binary16/32/64), the bfloat16 and OCP 8-bit floating point (OFP8, revision
1.0) formats.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from references.tensor import torch


@dataclass(frozen=True)
class DType:
    """A binary floating point format with `precision` significant bits (the hidden one
    included)."""

    name: str
    precision: int
    emin: int  # exponent of the smallest normal number, 2**emin
    max: float  # largest finite number
    itemsize: int  # bytes

    @property
    def torch(self) -> torch.dtype:
        dtype = getattr(torch, self.name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def unit_roundoff(self) -> float:
        """u: round-to-nearest has a relative error of at most u = 2**-precision in the normal
        range."""
        return 2.0**-self.precision

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.precision + 1)

    @property
    def has_infinity(self) -> bool:
        """Whether the exponent field's last value is kept for infinity and NaN, as in IEEE 754;
        float8_e4m3fn uses it."""
        return math.frexp(self.max)[1] - self.emin < (1 << (8 * self.itemsize - self.precision)) - 1

    @property
    def overflow(self) -> float:
        """Where round-to-nearest begins to give infinity: half an ulp above `max`."""
        return self.max + math.ldexp(1.0, math.frexp(self.max)[1] - 1 - self.precision)

    def holds(self, other: DType) -> bool:
        """Whether every finite number of the other format is one of this."""
        finer = (
            self.precision >= other.precision
            and self.smallest_subnormal <= other.smallest_subnormal
        )
        return finer and self.max >= other.max


_FORMATS = (
    DType("float64", 53, -1022, sys.float_info.max, 8),
    DType("float32", 24, -126, (2 - 2.0**-23) * 2.0**127, 4),
    DType("float16", 11, -14, 65504.0, 2),
    DType("bfloat16", 8, -126, (2 - 2.0**-7) * 2.0**127, 2),
    DType("float8_e4m3fn", 4, -6, 448.0, 1),
    DType("float8_e5m2", 3, -14, 57344.0, 1),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _FORMATS}


def dtype_named(name: str) -> DType:
    """The format of that name; raises ValueError that lists the known ones."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype: {name!r} is none of {', '.join(DTYPES)}") from None
