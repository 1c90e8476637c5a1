"""Matrix units bit for bit: the truncated fused dot-add of `verify.arithmetic.unit.Unit`,
vectorised in 64-bit integers.

A number is held as an integer significand and the exponent of its quantum, value = significand *
2**exponent.  Nothing is rounded before the two places where the unit does: the alignment and the
conversion.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DTYPES, DType
from verify.arithmetic.unit import Envelope, NearestChain, Promoted, Unit, Wiring

_TF32 = DType("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127, 4)
_FORMATS = {dtype.torch: dtype for dtype in DTYPES.values()}
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOWHERE = -(1 << 20)  # an exponent below that of every term
_LONGEST = 62  # shifts of an int64 by more are undefined


def fused_dot(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """c + sum of a * b over the last dimension, as `unit` adds it: instructions of L products,
    chained through c.

    a, b: (..., k) operands as stored: float16, bfloat16, float8_e4m3fn, float8_e5m2, or float32, of
    which a fused unit reads tf32 and drops the low 13 bits; a `NearestChain` adds product after
    product by fused multiply-adds in c's dtype. c: (...,) in the unit's accumulator; for a
    `Promoted`, in the dtype of its total.  Returns (...,) of c's dtype. A last group of fewer than
    L products is added alone.  Raises ValueError if the dtypes are not the unit's, if k is no
    multiple of the length of `Wiring.order`, and for an `Envelope`, which has no bits.
    """
    if isinstance(unit, Envelope):
        raise ValueError(
            f"unit: a bound of several ways to add ({unit.source}); name the instruction"
        )
    total = "float32" if isinstance(unit, Promoted) and not unit.own else unit.accumulator
    if c.dtype != DTYPES[total].torch:
        raise ValueError(f"c: {c.dtype} is not the unit's {total}")
    if isinstance(unit, NearestChain):
        return _chain(a, b, c, unit.wiring)
    if unit.wiring.via:
        a, b = (x.to(DTYPES[unit.wiring.via].torch) for x in (a, b))
    a, b = (_tf32(x) if x.dtype == torch.float32 else x for x in (a, b))
    if not isinstance(unit, Promoted):
        return _fused(a, b, c, unit)
    for at in range(0, a.shape[-1], unit.every):
        part = slice(at, at + unit.every)
        start = torch.zeros_like(c, dtype=DTYPES[unit.accumulator].torch)
        c = c + _fused(a[..., part], b[..., part], start, unit)
    return _with_nan(c, c.isnan(), unit.wiring)


def mma(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """c (m, n) + a (m, k) @ b (k, n), every element by `fused_dot`."""
    return fused_dot(
        a[:, None, :].expand(-1, b.shape[1], -1), b.mT[None].expand(len(a), -1, -1), c, unit
    )


def _fused(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    depth = len(unit.wiring.order)
    if depth:
        if a.shape[-1] % depth:
            raise ValueError(
                f"k: {a.shape[-1]} is no multiple of {depth}, the length of the unit's order"
            )
        order = torch.tensor(
            [at + i for at in range(0, a.shape[-1], depth) for i in unit.wiring.order]
        )
        a, b = a[..., order], b[..., order]
    for at in range(0, a.shape[-1], unit.products):
        part = slice(at, at + unit.products)
        c = _group(a[..., part], b[..., part], c, unit)
    return c


def _group(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """At most L products and c, aligned, added and converted once."""
    wiring, accumulator = unit.wiring, DTYPES[unit.accumulator]
    formats = [_operand(x.dtype) for x in (a, b)]
    (left, left_place), (right, right_place) = (
        _split(x, dtype, wiring.normalises) for x, dtype in zip((a, b), formats, strict=True)
    )
    products = left * right
    places = _of_zeros(products, left_place + right_place, wiring)
    bits = sum(dtype.precision - 1 for dtype in formats)
    carry, carry_place = _split(c, accumulator, False)
    carry_place = _of_zeros(carry, carry_place, wiring)
    most = places.amax(-1)
    if wiring.addend == "aligned":
        most = torch.maximum(most, carry_place)
    total = _shifted(products, unit.fraction - bits + places - most[..., None]).sum(-1)
    if wiring.addend == "after":
        own = torch.where(total == 0, most, most - unit.fraction + _length(total) - 1)
        total, most = (
            _shifted(total, most - torch.maximum(own, carry_place)),
            torch.maximum(own, carry_place),
        )
    total = total + _shifted(
        carry, unit.fraction - (accumulator.precision - 1) + carry_place - most
    )
    return _special(a, b, c, _converted(total, most - unit.fraction, unit), unit)


def _tf32(x: Tensor) -> Tensor:
    """fp32 without its low 13 bits: a NaN that has no others becomes an infinity."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _operand(dtype: torch.dtype) -> DType:
    if dtype == torch.float32:
        return _TF32
    if dtype not in _FORMATS or dtype == torch.float64:
        raise ValueError(f"operands: no fused unit multiplies {dtype}")
    return _FORMATS[dtype]


def _split(x: Tensor, dtype: DType, normalises: bool) -> tuple[Tensor, Tensor]:
    """Signed significand of `precision` bits, and exponent, of what is stored; of infinities and
    NaN anything.

    tf32 is stored as fp32.  Subnormals have the smallest exponent, unless they are normalised.
    """
    stored = 23 if x.dtype == torch.float32 else dtype.precision - 1
    word = x.view(_WORDS[x.element_size()]).long()
    field = (word >> stored) & ((1 << (8 * x.element_size() - 1 - stored)) - 1)
    significand = ((word & ((1 << stored) - 1)) | ((field > 0).long() << stored)) >> (
        stored + 1 - dtype.precision
    )
    exponent = field.clamp(min=1) + (dtype.emin - 1)
    if normalises:
        up = (dtype.precision - _length(significand)) * (significand != 0)
        significand, exponent = significand << up, exponent - up
    return torch.where(word < 0, -significand, significand), exponent


def _of_zeros(significand: Tensor, place: Tensor, wiring: Wiring) -> Tensor:
    return torch.where(significand == 0, _NOWHERE if wiring.zero is None else wiring.zero, place)


def _shifted(x: Tensor, by: Tensor) -> Tensor:
    """x * 2**by, toward zero."""
    size = x.abs()
    moved = (size << by.clamp(0, _LONGEST)) >> (-by).clamp(0, _LONGEST)
    return torch.where(x < 0, -moved, moved)


def _length(x: Tensor) -> Tensor:
    """Bits of |x| < 2**53; 0 of 0."""
    return torch.frexp(x.double())[1].long()


def _converted(total: Tensor, quantum: Tensor, unit: Unit) -> Tensor:
    """total * 2**quantum in the accumulator's dtype, with the unit's number of fraction bits."""
    accumulator, wiring = DTYPES[unit.accumulator], unit.wiring
    place = (quantum + _length(total) - 1).clamp(min=accumulator.emin)
    last = place - unit.output  # exponent of the result's last place
    size, by = total.abs(), last - quantum
    kept = _shifted(size, -by)
    if unit.rounding == "nearest":
        rest, half = (
            size - (kept << by.clamp(0, _LONGEST)),
            torch.ones_like(size) << (by - 1).clamp(0, _LONGEST),
        )
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
        # What is shorter than the shift is less than half a place.
        kept = kept + (up & (by > 0) & (by < _LONGEST))
    exact = _ldexp(kept.double(), torch.where(kept == 0, 0, last))
    if wiring.overflow == "saturate":
        exact = exact.clamp(max=accumulator.max)
    negative = (total < 0) & ((kept != 0) | (wiring.zeros != "positive"))
    return torch.where(negative, -exact, exact).to(accumulator.torch)


def _special(a: Tensor, b: Tensor, c: Tensor, result: Tensor, unit: Unit) -> Tensor:
    """NaN and infinities as IEEE 754 has them, whatever the finite terms are; and the zeros."""
    if unit.wiring.zeros == "ieee":
        zero = (a.double() == 0) | (b.double() == 0)
        minus = (zero & (a.signbit() != b.signbit())).all(-1) & (c == 0) & c.signbit()
        result = torch.where(minus, -torch.zeros_like(result), result)
    finite = [x.isfinite() for x in (a.double(), b.double(), c)]
    if all(bool(x.all()) for x in finite):
        return result
    # Products of finite operands are taken as finite, however large.
    products = torch.where(finite[0] & finite[1], 0.0, a.double() * b.double())
    total = products.sum(-1) + torch.where(finite[2], 0.0, c.double())
    result = torch.where(total.isinf(), total.to(result.dtype), result)
    return _with_nan(result, total.isnan(), unit.wiring)


def _with_nan(result: Tensor, nan: Tensor, wiring: Wiring) -> Tensor:
    if wiring.nan == "kept":
        return result
    word = _WORDS[result.element_size()]
    ones = torch.iinfo(word).max
    quiet = {torch.int16: 0x7E00, torch.int32: 0x7FC00000, torch.int64: 0x7FF8 << 48}[word]
    return (
        torch.where(nan, ones if wiring.nan == "ones" else quiet, result.view(word))
        .to(word)
        .view(result.dtype)
    )


def _ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2**exponent in fp64 where that is exact, in two steps so that neither factor leaves the
    range."""
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent in fp64, from its bits: a library's exp2 need not be exact."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _chain(a: Tensor, b: Tensor, c: Tensor, wiring: Wiring) -> Tensor:
    """Fused multiply-adds to nearest, one after the other, in c's dtype."""
    for j in range(a.shape[-1]):
        x, y = a[..., j].double(), b[..., j].double()
        c = _fma64(x, y, c) if c.dtype == torch.float64 else _cast(_fma(x, y, c.double()), c.dtype)
    return _with_nan(c, c.isnan(), wiring)


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of fp32 values in fp64: the product is exact, the sum rounded to odd, so that the
    cast that follows is right.

    Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, IEEE Transactions on
    Computers 57(4), 2008.
    """
    product = x * y
    total = product + z
    other = total - product
    lost = (product - (total - other)) + (z - other)
    bits = total.view(torch.int64)
    odd = torch.where((lost > 0) == (total > 0), bits + 1, bits - 1)
    even = (lost != 0) & total.isfinite() & (bits & 1 == 0)
    return torch.where(even, odd, bits).view(torch.float64)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 to nearest, at once: torch's own cast to fp16 rounds to fp32 before."""
    if dtype != torch.float16:
        return x.to(dtype)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x.numpy().astype(np.float16)))


def _fma64(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of fp64 values, by the C library, whose fma is correctly rounded (ISO C, section
    7.12.13).

    Of several NaN the processor chooses which one is kept.
    """
    fma = _library().fma
    rows = zip(*(t.expand(z.shape).flatten().tolist() for t in (x, y, z)), strict=True)
    return torch.tensor([fma(*row) for row in rows], dtype=torch.float64).reshape(z.shape)


@cache
def _library() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fma.argtypes, library.fma.restype = [ctypes.c_double] * 3, ctypes.c_double
    return library
