"""Experiments on a matrix instruction: sums of given products, and their results.

An experiment names the values of its products.  Each is split into two operands whose product is
exactly that value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.probes.instructions import WORDS, Dot, Instruction


class UnrepresentableError(ValueError):
    """No two operands have that product, or no accumulator that value."""


@dataclass(frozen=True)
class Sum:
    """One experiment: products by position, the accumulator's initial value c, and operand pairs
    (a, b) by position if the operands matter and not only their product."""

    products: Mapping[int, float] = field(default_factory=dict)
    c: float = 0.0
    pairs: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lab:
    """An instruction, and a function that runs it on a device or computes its model."""

    instruction: Instruction
    dot: Dot

    @property
    def depth(self) -> int:
        return self.instruction.depth

    @property
    def operands(self) -> DType:
        return self.instruction.format

    @property
    def result(self) -> DType:
        return self.instruction.result

    def run(self, sums: Sequence[Sum]) -> list[float]:
        """The exact results.  Raises UnrepresentableError."""
        results: list[float] = self._results(sums).double().tolist()
        return results

    def bits(self, sums: Sequence[Sum]) -> list[str]:
        """The results' bits, in hexadecimal digits.  Raises UnrepresentableError."""
        return hexadecimal(self._results(sums))

    def _results(self, sums: Sequence[Sum]) -> Tensor:
        # Most experiments hold few values, many times.
        values = dict.fromkeys(value for one in sums for value in one.products.values())
        known = {value: factors(value, self.operands) for value in values}
        left, right = ([[0.0] * self.depth for _ in sums] for _ in "ab")
        for x_row, y_row, one in zip(left, right, sums, strict=True):
            pairs = {at: known[value] for at, value in one.products.items()} | dict(one.pairs)
            for at, (x, y) in pairs.items():
                x_row[at], y_row[at] = x, y
        a, b = torch.tensor([left, right], dtype=torch.float64).view(2, len(sums), self.depth)
        c = torch.tensor([one.c for one in sums], dtype=torch.float64)
        dtype = self.instruction.dtype
        return self.dot(_exact(a, dtype), _exact(b, dtype), _exact(c, self.result.torch))


def hexadecimal(values: Tensor) -> list[str]:
    """The bits of each value, in the dtype's number of hexadecimal digits."""
    size = values.element_size()
    words = values.contiguous().flatten().view(WORDS[size]).tolist()
    return [f"{word & ((1 << 8 * size) - 1):0{2 * size}x}" for word in words]


def factors(value: float, format: DType) -> tuple[float, float]:
    """Two operands whose product is exactly `value`, normal numbers if possible.

    Raises UnrepresentableError.
    """
    if value == 0:
        return 0.0, 0.0
    fraction, exponent = math.frexp(value)
    significand, exponent = 2 * fraction, exponent - 1  # 1 <= |significand| < 2
    largest = math.frexp(format.max)[1] - 1
    smallest = format.emin - format.precision + 1
    for least in (format.emin, smallest):
        left = min(max(math.ceil(exponent / 2), least), largest)
        right = exponent - left
        if right < least:
            left, right = exponent - least, least
        x, y = math.ldexp(significand, left), math.ldexp(1.0, right)
        if (
            left >= least
            and right <= largest
            and representable(x, format)
            and representable(y, format)
        ):
            return x, y
    raise UnrepresentableError(f"{value} is no product of two {format.name}")


def representable(value: float, format: DType) -> bool:
    """Whether the format has this finite value."""
    if value == 0:
        return True
    exponent = max(math.frexp(value)[1] - 1, format.emin)
    return (
        math.ldexp(value, format.precision - 1 - exponent).is_integer() and abs(value) <= format.max
    )


def _exact(values: Tensor, dtype: torch.dtype) -> Tensor:
    cast = values.to(dtype)
    inexact = (cast.double() != values) & ~(cast.double().isnan() & values.isnan())
    if bool(inexact.any()):
        raise UnrepresentableError(f"{float(values[inexact][0])} is no {dtype}")
    return cast
