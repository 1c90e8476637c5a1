"""What alignment costs where operands are subnormal (docs/tolerance.md, *Subnormal operands*), by
row and by column.

A unit that does not normalise aligns a product with a subnormal operand as if that were 2**emin,
its format's smallest normal number (`Unit.threshold`), and cuts what is added beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.positions import Sizes
from references.row_blocks import RowBlock
from verify.arithmetic.dtypes import DType
from verify.arithmetic.mma import Envelope, Unit
from verify.problem import Problem

# tf32x3 multiplies low parts, which may be subnormal where the operand is so much larger
_LOW_PARTS = 2.0**24


@dataclass(frozen=True)
class Operands:
    """How Q and K, or dO and V, enter a product-sum.

    query, key: what the reference's numbers are divided by there: their descale, over what the
    scale has multiplied them by. error: relative error of an operand.  lost: what it may lose below
    the normal range, absolutely, because it is rounded there or flushed.
    """

    unit: Unit
    dtype: DType
    query: float = 1.0
    key: float = 1.0
    error: float = 0.0
    lost: float = 0.0

    def loss(self, terms: int, query: Sizes, key: Sizes) -> Tensor:
        """What a sum of so many products may lose.  Sizes are the reference's, and broadcast."""
        growth = (1 + self.error) * (1 + self.unit.kappa(terms))
        least = self.unit.threshold(self.dtype)
        each = self.unit.misalignment(terms, self.dtype, 1.0) + terms * self.lost * growth
        known = _LOW_PARTS if isinstance(self.unit, Envelope) and self.dtype.itemsize == 4 else 1.0
        small = (
            (1 + 2 * self.error) * known * max(least, 2.0**self.dtype.emin if self.lost else 0.0)
        )
        by_query = (
            (query.least < small * self.query) * self.query * key.most.clamp(min=least * self.key)
        )
        by_key = (
            (key.least < small * self.key) * self.key * query.most.clamp(min=least * self.query)
        )
        return each * (by_query + by_key)


def whole(sizes: Sizes) -> Sizes:
    """Of all columns together."""
    if not sizes.most.shape[-1]:
        return Sizes(
            sizes.least.new_full((*sizes.least.shape[:-1], 1), torch.inf),
            sizes.most.new_zeros((*sizes.most.shape[:-1], 1)),
        )
    return Sizes(sizes.least.amin(-1, keepdim=True), sizes.most.amax(-1, keepdim=True))


def scores_loss(block: RowBlock, operands: Operands, problem: Problem) -> Tensor | None:
    """What the scaled scores of a row may lose: (heads, rows, 1); None: nothing."""
    if not operands.unit.threshold(operands.dtype) and not operands.lost:
        return None
    found = abs(problem.scale) * operands.loss(
        problem.head_dim, block.query_sizes, whole(block.key_sizes)
    )
    return found if bool(found.any()) else None


@dataclass(frozen=True, eq=False)
class Lost:
    """What rounding takes from weights below their format's normal range, summed: with the sizes of
    what they multiply, and alone."""

    weighted: Tensor
    alone: Tensor


@dataclass(frozen=True)
class Weighted:
    """Sums of weights, rounded to a format, times an operand of another: P V and its like."""

    unit: Unit
    weights: DType
    operand: DType
    length: int  # terms of a sum, masked ones included
    multiplied: float = 1.0  # what the reference's operand is multiplied by before

    @property
    def threshold(self) -> float:
        """What a subnormal operand counts as, in the reference's units."""
        return self.unit.threshold(self.operand) / self.multiplied

    @property
    def share(self) -> float:
        """What subnormal weights cost, of what rounding takes from them: half a last place of each
        at least, which is 2**-precision of what they are aligned as.  (What tf32 keeps of fp32 has
        11 bits.)"""
        return self._cut * 2.0 ** min(self.weights.precision, 11) if self.threshold else 0.0

    @property
    def by_operand(self) -> float:
        """What a subnormal operand costs, of the sum of the weights."""
        return self._cut * self.threshold * (1 + self.weights.unit_roundoff)

    def loss(
        self,
        terms: Tensor,
        total: Tensor | float,
        reach: Tensor,
        lost: Lost,
        small: Tensor | bool = True,
    ) -> Tensor:
        """What such sums of `terms` each, of weights that add up to `total`, may lose to alignment.

        reach: sums of weight times |operand|, half of what they are after rounding at least.
        small: where an operand may be subnormal.  What is aligned together is `Unit.group` terms at
        most, of which the one that is aligned wrongly has its last place at least, and no larger
        weight than all of them together.
        """
        if small is False:
            return self.share * lost.weighted
        used = terms.clamp(max=self.unit.group) / self.unit.group
        by_operand = self.by_operand * used * total + self.share * self.threshold * lost.alone
        known = self._cut * 2.0 ** (self.weights.precision + self.operand.precision - 1) * reach
        return self.share * lost.weighted + torch.minimum(by_operand, known) * small

    @property
    def _cut(self) -> float:
        """What all that is aligned together may lose, as part of 2**E."""
        least, n = self.unit.threshold(self.weights), max(self.length, 1)
        return (
            self.unit.misalignment(n, self.weights, 1.0) / (n * least) * self.unit.group
            if least
            else 0.0
        )
