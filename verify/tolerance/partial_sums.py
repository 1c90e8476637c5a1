"""What a product-sum may be off by where its exact value is known: no partial sum of its products
is larger than half of the sum of their sizes and of its own size.

The derivation is docs/tolerance.md, *Partial sums*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.mma import NearestChain, Unit
from verify.tolerance.scratch import room_on

_STEP = 8  # products of a chain between two of its partial sums that are computed


def of_product(unit: Unit, terms: int, operands: float = 0.0) -> tuple[float, float]:
    """The error of a product-sum S of so many terms: the first number times the sum of sizes, G,
    and the second times |S|.  Absolute errors are not in it.

    operands: relative error of a product before it is summed.
    """
    of_sizes, of_sums = unit.split(terms)
    by_size = operands + (1 + operands) * of_sizes + of_sums * (0.5 + operands)
    return by_size, of_sums / 2


def saved(of_sums: Tensor | float, sizes: Tensor, sums: Tensor) -> Tensor:
    """What an error is smaller by than with all of it relative to G.

    of_sums: the part that is relative to partial sums.  sizes: G, or more.  sums: bound on |S|.
    """
    return (sizes - sums).clamp_(min=0.0).mul_(of_sums / 2)


@dataclass(frozen=True, eq=False)
class Terms:
    """What product-sums add up along their last dimension: left (heads, rows, terms), right (heads,
    keys, terms), in any precision; sizes: the sums of |left| |right|, (heads, rows, keys)."""

    left: Tensor
    right: Tensor
    sizes: Tensor


def precision(x: Tensor) -> torch.dtype:
    """What partial sums are computed in: fp32, for three digits of them are enough; on a GPU, which
    could multiply fp32 by tf32, fp64."""
    return torch.float64 if x.is_cuda else torch.float32


def terms_of(block: RowBlock, scale: float) -> Terms:
    """Of the block's scores, which |scale| multiplies; K of each head in the precision of partial
    sums, so that it is copied in that."""
    keys = block.keys_of_heads.to(precision(block.queries))[block.key_heads]
    return Terms(block.queries * scale, keys, block.magnitude)


def smaller_in_order(error: Tensor, given: Terms, unit: Unit, operands: float = 0.0) -> None:
    """Make the errors of product-sums smaller where their partial sums, in the order of their
    terms, are known to be small.

    error: (heads, rows, keys).  operands: as in `of_product`.  The partial sums are computed in
    fp32, for three digits of them are enough.
    """
    leaf = (1 + operands) * (1 + 2 * unit.operand_error) - 1
    terms, chain = given.left.shape[-1], isinstance(unit, NearestChain)
    kappa = unit.kappa(terms) - 2 * unit.operand_error
    total = _chain(given, unit) if chain else _fused(given, unit)
    # Between two computed sums of a chain lie others, larger by half of the sizes between them; and
    # products that are rounded alone.
    by_size = leaf + kappa * (leaf + terms * 2.0**-22)
    if chain:
        by_size += (_STEP / 2 + 1) * 2.0**-unit.fraction * (1 + kappa)
    each = (1 + unit.products * 2.0**-unit.fraction) * (1 + 2.0**-unit.output)
    growth = each ** (terms if chain else -(-terms // unit.products)) * (1 + 2.0**-16)
    room = room_on(error.device, "order")
    room.clear(error)
    ordered = torch.mul(given.sizes, by_size, out=room.take())
    ordered.add_(total, alpha=growth * (1 + leaf))
    torch.fmin(error, ordered, out=error)  # fp32 may overflow, to NaN


def _operands(given: Terms) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Both operands in the precision of partial sums, and three tensors like the sums."""
    left, right = (x.to(precision(x)) for x in (given.left, given.right))
    room = room_on(left.device, "partial sums")
    room.clear(left, *given.sizes.shape)
    return left, right, (room.take().zero_(), room.take().zero_(), room.take().zero_())


def _fused(given: Terms, unit: Unit) -> Tensor:
    """Of a matrix unit: per instruction, 2^-F of the largest term for each product, and 2^-p of the
    sum; fp32."""
    queries, keys, (total, running, size) = _operands(given)
    for at in range(0, queries.shape[-1], unit.products):
        part = slice(at, at + unit.products)
        q, k = queries[..., part], keys[..., part]
        largest = q.abs().amax(-1, keepdim=True), k.abs().amax(-1)[:, None]
        torch.maximum(size, largest[0] * largest[1], out=size)
        total.add_(size, alpha=q.shape[-1] * 2.0**-unit.fraction)
        torch.abs(running.baddbmm_(q, k.mT), out=size)
        total.add_(size, alpha=2.0**-unit.output)
    return total


def _chain(given: Terms, unit: Unit) -> Tensor:
    """Of a chain of additions to nearest: u of every partial sum, each taken as the mean of the two
    computed ones around it; fp32."""
    queries, keys, (total, running, size) = _operands(given)
    for at in range(0, queries.shape[-1], _STEP):
        part = slice(at, at + _STEP)
        q, k = queries[..., part], keys[..., part]
        half = q.shape[-1] * 2.0**-unit.fraction / 2
        total.add_(size, alpha=half)
        torch.abs(running.baddbmm_(q, k.mT), out=size)
        total.add_(size, alpha=half)
    return total
