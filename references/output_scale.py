"""ScaledOutput: O in 8 bits, with one factor for the whole tensor.

A kernel gets the factor s, a positive fp32 number, and stores

    O8 = round(clamp(s O, -max, max))

to nearest, ties to even, where max is the largest finite number of the format: 448 in e4m3fn, 57344
in e5m2.  A reader of O8 divides by s.  An s O beyond max, infinities included, is stored as max
with its sign; NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from references.premises import Premise

DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""The 8-bit formats of O."""

LARGEST = 2.0**64
"""The largest s, and 1 over the smallest: neither s O nor a product of s and a factor of V leaves
fp32's range."""


@dataclass(frozen=True)
class ScaledOutput:
    """The feature of a problem whose O is in 8 bits.  dtype: of `DTYPES`; scale: s."""

    dtype: str
    scale: float
    label: ClassVar[str] = "output in 8 bits"
    # O8 is rounded after it was scaled, and where it saturates, O8 of twice V is not twice O8.
    breaks: ClassVar[frozenset[Premise]] = frozenset(
        {Premise.EXACT_OUTPUT, Premise.LINEAR_IN_VALUES}
    )
