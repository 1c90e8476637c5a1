"""What a product-sum may be off by where its exact value is known: no partial sum of its products
is larger than half of the sum of their sizes and of its own size.

The derivation is docs/tolerance.md, *Partial sums*.
"""

from __future__ import annotations

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


def smaller_in_order(
    error: Tensor, block: RowBlock, unit: Unit, scale: float, operands: float
) -> None:
    """Make the errors of the block's product-sums smaller where their partial sums, in the order of
    head_dim, are known to be small.

    error: (heads, rows, keys), of sums that |scale| has multiplied.  operands: as in `of_product`.
    The partial sums are computed in fp32, for three digits of them are enough.
    """
    leaf = (1 + operands) * (1 + 2 * unit.operand_error) - 1
    terms, chain = block.queries.shape[-1], isinstance(unit, NearestChain)
    kappa = unit.kappa(terms) - 2 * unit.operand_error
    total = _chain(block, unit, scale) if chain else _fused(block, unit, scale)
    # Between two computed sums of a chain lie others, larger by half of the sizes between them; and
    # products that are rounded alone.
    by_size = leaf + kappa * (leaf + terms * 2.0**-22)
    if chain:
        by_size += (_STEP / 2 + 1) * 2.0**-unit.fraction * (1 + kappa)
    each = (1 + unit.products * 2.0**-unit.fraction) * (1 + 2.0**-unit.output)
    growth = each ** (terms if chain else -(-terms // unit.products)) * (1 + 2.0**-16)
    room = room_on(error.device, "order")
    room.clear(error)
    ordered = torch.mul(block.magnitude, by_size, out=room.take())
    ordered.add_(total, alpha=growth * (1 + leaf))
    torch.fmin(error, ordered, out=error)  # fp32 may overflow, to NaN


def _operands(block: RowBlock, scale: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Q, scaled, and K of each head in fp32, and three tensors like the scores; on a GPU, which
    could multiply fp32 by tf32, in fp64."""
    dtype = torch.float64 if block.queries.is_cuda else torch.float32
    queries = (block.queries * scale).to(dtype)
    keys = block.keys_of_heads.to(dtype)[block.key_heads]
    room = room_on(queries.device, "partial sums")
    room.clear(queries, *block.scores.shape)
    return queries, keys, (room.take().zero_(), room.take().zero_(), room.take().zero_())


def _fused(block: RowBlock, unit: Unit, scale: float) -> Tensor:
    """Of a matrix unit: per instruction, 2^-F of the largest term for each product, and 2^-p of the
    sum; fp32."""
    queries, keys, (total, running, size) = _operands(block, scale)
    for at in range(0, queries.shape[-1], unit.products):
        part = slice(at, at + unit.products)
        q, k = queries[..., part], keys[..., part]
        largest = q.abs().amax(-1, keepdim=True), k.abs().amax(-1)[:, None]
        torch.maximum(size, largest[0] * largest[1], out=size)
        total.add_(size, alpha=q.shape[-1] * 2.0**-unit.fraction)
        torch.abs(running.baddbmm_(q, k.mT), out=size)
        total.add_(size, alpha=2.0**-unit.output)
    return total


def _chain(block: RowBlock, unit: Unit, scale: float) -> Tensor:
    """Of a chain of additions to nearest: u of every partial sum, each taken as the mean of the two
    computed ones around it; fp32."""
    queries, keys, (total, running, size) = _operands(block, scale)
    for at in range(0, queries.shape[-1], _STEP):
        part = slice(at, at + _STEP)
        q, k = queries[..., part], keys[..., part]
        half = q.shape[-1] * 2.0**-unit.fraction / 2
        total.add_(size, alpha=half)
        torch.abs(running.baddbmm_(q, k.mT), out=size)
        total.add_(size, alpha=half)
    return total
