"""What a product-sum may be off by where its exact value is known: no partial sum of its products
is larger than half of the sum of their sizes and of its own size.

The derivation is docs/tolerance.md, *Partial sums*.
"""

from __future__ import annotations

from torch import Tensor

from verify.arithmetic.mma import Unit


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
