"""Sums of products as matrix units and serial chains make them, in explicit roundings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.mma import Unit
from verify.arithmetic.rounding import power_of_two

_NOTHING = -900  # exponent of a zero term
_NO_OPERAND = -5000  # of a zero operand, below every other with the largest of the other side
# products at a time: on a CPU what caches hold
_PART = {"cpu": 2**18, "cuda": 2**26, "meta": 2**26}


def fused_dot(
    a: Tensor, b: Tensor, unit: Unit, start: Tensor | None = None, least: int = -1100
) -> Tensor:
    """a (n, rows, terms) @ b (n, terms, columns) on a matrix unit, added to `start`: fp32 (n, rows,
    columns).

    least: the smallest exponent used for an operand, see `least_exponent`.
    """
    if a.shape[1] > b.shape[2]:  # the longer of the two is the innermost in memory
        turned = None if start is None else start.mT
        return fused_dot(b.mT, a.mT, unit, turned, least).mT
    rows, columns = a.shape[1], b.shape[2]
    total = a.new_zeros(len(a), rows, columns, dtype=torch.float32) if start is None else start
    sides = [x.double().contiguous() for x in (a.mT, b)]
    places = [_exponents(x, least) for x in sides]
    size = rows * columns * min(unit.products, a.shape[2])
    together = max(_PART[a.device.type] // max(size, 1), 1)
    made = []
    for first in range(0, len(a), together):
        heads = slice(first, first + together)
        part = total[heads]
        for at in range(0, a.shape[2], unit.products):
            index = heads, slice(at, at + unit.products)
            x, y = (side[index] for side in sides)
            highest = torch.amax(places[0][index][..., None] + places[1][index][:, :, None], 1)
            part = _added(x[..., None] * y[:, :, None], highest, part, unit)
        made.append(part)
    return torch.cat(made) if len(made) > 1 else made[0] if made else total


def _exponents(x: Tensor, least: int) -> Tensor:
    """Those of fp64 numbers that fp32 holds, int16; of zeros, what makes none of a product's
    largest."""
    field = (x.view(torch.int64) >> 52).bitwise_and_(0x7FF).sub_(1023)
    return field.clamp_(min=least).masked_fill_(x == 0, _NO_OPERAND).to(torch.int16)


def _added(products: Tensor, highest: Tensor, start: Tensor, unit: Unit) -> Tensor:
    """start + the products (n, terms, rows, columns), whose memory is used, as one instruction adds
    them; highest: of the products' exponents."""
    carry = start.double()
    own = (carry.view(torch.int64) >> 52).bitwise_and_(0x7FF).sub_(1023)  # of 0: -1023
    place = torch.maximum(own, highest).clamp_(_NOTHING, 1000).sub_(unit.fraction)
    step = power_of_two(place)
    # a power of two divides exactly
    torch.div(products, step[:, None], rounding_mode="trunc", out=products)
    exact = products.sum(1).add_(carry.div_(step).trunc_()).mul_(step)
    return to_half(exact) if unit.rounding == "nearest" else _toward_zero(exact, unit.output)


def least_exponent(unit: Unit, kind: str) -> int:
    """The smallest exponent of an operand: its format's emin, unless the unit normalises."""
    least = unit.threshold(dtype_named("float32" if kind == "tf32" else kind))
    return int(math.log2(least)) if least else -1100


def to_half(x: Tensor) -> Tensor:
    """fp64 rounded once to fp16, as fp32."""
    # To odd first: no tie of the second rounding is one that the first has made.
    single = _cut(x)
    odd = (single.view(torch.int32) | (single.double() != x)).view(torch.float32)
    return odd.half().float()


def serial_dot(
    a: Tensor, b: Tensor, start: Tensor | None = None, kept: torch.dtype = torch.float32
) -> Tensor:
    """The same in fp32 to nearest, product by product, from left to right.

    kept: the dtype that sums are rounded to.
    """
    if start is None:
        start = a.new_zeros(len(a), a.shape[1], b.shape[2], dtype=torch.float32)
    total = start.clone()
    for j in range(a.shape[2]):
        total += a[:, :, j, None] * b[:, j, None]
        total = total.to(kept).float()
    return total


def _cut(x: Tensor) -> Tensor:
    """fp64 to fp32 towards 0."""
    nearest = x.float()
    beyond = nearest.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def _toward_zero(x: Tensor, fraction: int) -> Tensor:
    """fp64 to fp32 with so many fraction bits."""
    if x.device.type == "cpu":  # a question to a GPU costs more than the answer saves
        kept = (x.view(torch.int64) & -(1 << (52 - fraction))).view(torch.float64)
        single = kept.float()
        if bool((single.double() == kept).all()):  # neither subnormal nor an overflow
            return single
    return (_cut(x).view(torch.int32) & -(1 << (23 - fraction))).view(torch.float32)


def serial_sum(x: Tensor) -> Tensor:
    """Along the last dimension, which stays, in fp32 and in order."""
    total = x.new_zeros(*x.shape[:-1], 1, dtype=torch.float32)
    for n in range(x.shape[-1]):
        total = total + x[..., n : n + 1]
    return total


def truncate_tf32(x: Tensor) -> Tensor:
    """fp32 without its low 13 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def truncated(x: Tensor, kind: DType) -> Tensor:
    """fp32 cut to the numbers of a format, towards 0; subnormals included, but no overflow."""
    exponent = torch.frexp(x).exponent.clamp(min=kind.emin + 1)
    last = exponent - kind.precision
    return torch.ldexp(torch.ldexp(x, -last).trunc(), last)
