"""A matrix unit computed with fractions, from the definitions of the formats; tests compare `dot`
with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from verify.arithmetic.mma import Unit

# Exponent bits, fraction bits, whether the largest exponent means infinity and NaN; tf32 is read
# from fp32's bits.
LAYOUTS = {
    "float16": (5, 10, True),
    "bfloat16": (8, 7, True),
    "tf32": (8, 23, True),
    "float8_e4m3fn": (4, 3, False),
    "float8_e5m2": (5, 2, True),
    "float32": (8, 23, True),
}
SPECIAL = ("inf", "-inf", "nan")
Number = Fraction | str
# value, exponent of its alignment (None: it is zero), sign bit
Term = tuple[Number, int | None, int]


@lru_cache(1 << 16)
def decoded(word: int, kind: str) -> tuple[Number, int, int]:
    """The value, the exponent and the sign bit of a bit pattern, by the format's definition."""
    exponent_bits, fraction_bits, ieee = LAYOUTS[kind]
    sign, field = (
        word >> (exponent_bits + fraction_bits),
        (word >> fraction_bits) & ((1 << exponent_bits) - 1),
    )
    fraction, bias = word & ((1 << fraction_bits) - 1), (1 << (exponent_bits - 1)) - 1
    if kind == "tf32":
        fraction &= ~0x1FFF
    if ieee and field == (1 << exponent_bits) - 1:
        return ("nan" if fraction else ("-inf" if sign else "inf")), 0, sign
    if not ieee and word & 0x7F == 0x7F:
        return "nan", 0, sign
    exponent = max(field, 1) - bias
    significand = Fraction(fraction, 1 << fraction_bits) + (field > 0)
    return (-1 if sign else 1) * significand * Fraction(2) ** exponent, exponent, sign


def toward_zero(x: Fraction) -> int:
    return math.trunc(x)


def place_of(x: Fraction) -> int:
    """Exponent of the leading bit."""
    exponent = (
        x.numerator.bit_length() - x.denominator.bit_length()
        if x > 0
        else (-x).numerator.bit_length() - x.denominator.bit_length()
    )
    return exponent if abs(x) >= Fraction(2) ** exponent else exponent - 1


def slow_group(a: Sequence[int], b: Sequence[int], c: int, kind: str, unit: Unit) -> int:
    """One group of products, computed with fractions, from bit patterns to a bit pattern."""
    wiring, accumulator = unit.wiring, unit.accumulator
    terms: list[Term] = []
    for left, right in zip(a, b, strict=True):
        (x, ex, sx), (y, ey, sy) = decoded(left, kind), decoded(right, kind)
        if x in SPECIAL or y in SPECIAL:
            terms.append((special_product(x, y, sx ^ sy), None, sx ^ sy))
            continue
        assert isinstance(x, Fraction)
        assert isinstance(y, Fraction)
        if wiring.normalises and x * y:
            ex, ey = place_of(x), place_of(y)
        terms.append((x * y, ex + ey if x * y else wiring.zero, sx ^ sy))
    z, ez, sz = decoded(c, accumulator)
    carry: Term = (z, None if z in SPECIAL else (ez if z else wiring.zero), sz)
    infinities = {t[0] for t in (*terms, carry) if t[0] in SPECIAL}
    bits = 32 if accumulator == "float32" else 16
    top = 0xFF << 23 if bits == 32 else 0x1F << 10
    if "nan" in infinities or len(infinities) == 2:
        return (
            (1 << (bits - 1)) - 1
            if wiring.nan == "ones"
            else top | top >> 1 & ~top | (1 << (22 if bits == 32 else 9))
        )
    if infinities:
        return top | (infinities == {"-inf"}) << (bits - 1)
    if wiring.zeros == "ieee" and all(t[2] and not t[0] for t in (*terms, carry)):
        return 1 << (bits - 1)
    products = [t for t in terms if t[1] is not None]
    if wiring.addend == "aligned":
        total = added([*products, *([carry] if carry[1] is not None else [])], unit.fraction)
    else:
        part = added(products, unit.fraction)
        most = max((t[1] for t in products if t[1] is not None), default=None)
        place = most if not part else place_of(part)
        both: list[Term] = [(part, place, 0)] if place is not None else []
        total = added([*both, *([carry] if carry[1] is not None else [])], unit.fraction)
    return encoded(total, unit, bits)


def special_product(x: Number, y: Number, sign: int) -> str:
    if "nan" in (x, y) or 0 in (x, y):
        return "nan"
    return "-inf" if sign else "inf"


def added(terms: Sequence[Term], fraction: int) -> Fraction:
    if not terms:
        return Fraction(0)
    quantum = Fraction(2) ** (max(place for _, place, _ in terms if place is not None) - fraction)
    return sum((toward_zero(Fraction(value) / quantum) for value, _, _ in terms), 0) * quantum


def encoded(total: Fraction, unit: Unit, bits: int) -> int:
    exponent_bits, fraction_bits, _ = LAYOUTS[unit.accumulator]
    bias = (1 << (exponent_bits - 1)) - 1
    if not total:
        return 0
    sign = 1 << (bits - 1) if total < 0 else 0
    quantum = Fraction(2) ** (max(place_of(total), 1 - bias) - unit.output)
    kept = (
        toward_zero(abs(total) / quantum)
        if unit.rounding == "zero"
        else round(abs(total) / quantum)
    )
    value = kept * quantum
    if not value:
        return 0 if unit.wiring.zeros == "positive" else sign
    if value >= Fraction(2) ** (bias + 1):
        infinity = ((1 << exponent_bits) - 1) << fraction_bits
        return sign | (infinity - 1 if unit.wiring.overflow == "saturate" else infinity)
    place = place_of(value)
    if place < 1 - bias:
        return sign | int(value / Fraction(2) ** (1 - bias - fraction_bits))
    significand = int(value / Fraction(2) ** (place - fraction_bits))
    return sign | (place + bias) << fraction_bits | significand & ((1 << fraction_bits) - 1)


def slow_dot(a: Sequence[int], b: Sequence[int], c: int, kind: str, unit: Unit) -> int:
    order = unit.wiring.order
    if order:
        chosen = [at + i for at in range(0, len(a), len(order)) for i in order]
        a, b = [a[i] for i in chosen], [b[i] for i in chosen]
    for at in range(0, len(a), unit.products):
        c = slow_group(a[at : at + unit.products], b[at : at + unit.products], c, kind, unit)
    return c
