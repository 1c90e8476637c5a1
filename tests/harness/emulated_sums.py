"""Sums of products as matrix units and serial chains make them, in explicit roundings."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.mma import Unit

_NOTHING = -900  # exponent of a zero term


def fused_dot(
    a: Tensor, b: Tensor, unit: Unit, start: Tensor | None = None, least: int = -1100
) -> Tensor:
    """a (n, rows, terms) @ b (n, terms, columns) on a matrix unit, added to `start`: fp32 (n, rows,
    columns).

    least: the smallest exponent used for an operand, see `least_exponent`.
    """
    rows, columns = (a.shape[1], b.shape[2])
    total = torch.zeros(a.shape[0], rows, columns) if start is None else start
    a64, b64 = a.double(), b.double()
    places = [torch.frexp(x)[1].clamp(min=least + 1) - 1 for x in (a64, b64)]
    for at in range(0, a.shape[2], unit.products):
        part = slice(at, at + unit.products)
        products = a64[:, :, part, None] * b64[:, None, part]
        exponents = places[0][:, :, part, None] + places[1][:, None, part]
        exponents = torch.where(products == 0, _NOTHING, exponents).amax(2)
        carry = torch.where(total == 0, _NOTHING, torch.frexp(total.double())[1] - 1)
        step = torch.exp2((torch.maximum(exponents, carry) - unit.fraction).double())
        exact = (products / step[:, :, None]).trunc().sum(2) + (total.double() / step).trunc()
        total = (
            to_half(exact * step)
            if unit.rounding == "nearest"
            else _toward_zero(exact * step, unit.output)
        )
    return total


def least_exponent(unit: Unit, kind: str) -> int:
    """The smallest exponent of an operand: its format's emin, unless the unit normalises."""
    least = unit.threshold(dtype_named("float32" if kind == "tf32" else kind))
    return int(math.log2(least)) if least else -1100


def to_half(x: Tensor) -> Tensor:
    """fp64 rounded once to fp16, as fp32."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.numpy().astype(np.float16)).float()


def serial_dot(
    a: Tensor, b: Tensor, start: Tensor | None = None, kept: torch.dtype = torch.float32
) -> Tensor:
    """The same in fp32 to nearest, product by product, from left to right.

    kept: the dtype that sums are rounded to.
    """
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[2]) if start is None else start.clone()
    for j in range(a.shape[2]):
        total += a[:, :, j, None] * b[:, j, None]
        total = total.to(kept).float()
    return total


def _toward_zero(x: Tensor, fraction: int) -> Tensor:
    nearest = x.float()
    single = torch.where(
        nearest.double().abs() > x.abs(),
        torch.nextafter(nearest, torch.zeros_like(nearest)),
        nearest,
    )
    return (single.view(torch.int32) & -(1 << (23 - fraction))).view(torch.float32)


def serial_sum(x: Tensor) -> Tensor:
    """Along the last dimension, which stays, in fp32 and in order."""
    total = torch.zeros(*x.shape[:-1], 1)
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
