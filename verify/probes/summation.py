"""The order in which a matrix instruction adds its products and the accumulator, as a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from verify.probes import tree
from verify.probes.lab import Lab, Sum
from verify.probes.tree import InconsistentError, Node


@dataclass(frozen=True)
class Summation:
    """The tree of one instruction's sum (docs/probes.md), measured when it is first asked for.

    Leaf `lab.depth` is the accumulator, the others are products.
    """

    lab: Lab

    @cached_property
    def top(self) -> int:
        """The exponent of the huge values."""
        largest = 2 * (math.frexp(self.lab.operands.max)[1] - 1)
        return min(
            largest,
            math.frexp(self.lab.result.max)[1] - 1,
            500 if self.lab.result.precision > 24 else 60,
        )

    @cached_property
    def _unit(self) -> float:
        """The smallest value that all leaves can have and whose sums are exact in the
        accumulator."""
        least = 2 * (self.lab.operands.emin - self.lab.operands.precision + 1)
        exact = self.lab.result.emin - self.lab.result.precision + 1 + 4
        normal = 2 * self.lab.operands.emin
        for exponent in (least, normal):
            unit = 2.0 ** max(exponent, exact, -self.top)
            every = Sum(dict.fromkeys(range(self.lab.depth), unit), c=unit)
            if self.lab.run([every]) == [unit * (self.lab.depth + 1)]:
                return unit
        raise InconsistentError("sums of small numbers alone lose some of them")

    @cached_property
    def _tree(self) -> Node | str:
        """The tree of the sum, or why there is none."""
        count = self.lab.depth + 1

        def meeting(pairs: Sequence[tuple[int, int]]) -> list[int]:
            sums = []
            for i, j in pairs:
                leaves = [self._unit] * count
                leaves[i], leaves[j] = 2.0**self.top, -(2.0**self.top)
                sums.append(Sum(dict(enumerate(leaves[:-1])), c=leaves[-1]))
            return [count - round(result / self._unit) for result in self.lab.run(sums)]

        try:
            return tree.reveal(range(count), meeting)
        except InconsistentError as error:
            return f"no tree: {error}"

    @cached_property
    def chain(self) -> list[tuple[int, ...]] | None:
        """Groups of products and the accumulator, the innermost first; None if the tree is not a
        chain."""
        return None if isinstance(self._tree, str) else tree.chain(self._tree)

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of leaves that are added together, in any tree; inner groups before outer ones."""

        def of(node: Node) -> list[tuple[int, ...]]:
            return [g for part in node.sums for g in of(part)] + [node.direct] * bool(node.direct)

        return [] if isinstance(self._tree, str) else of(self._tree)

    @cached_property
    def text(self) -> str:
        """The tree in words, or why there is none."""
        if isinstance(self._tree, str):
            return self._tree
        if self.chain is None:
            return self._nested(self._tree)
        return " -> ".join(f"({self._named(group)})" for group in self.chain)

    def _nested(self, node: Node) -> str:
        parts = [self._nested(part) for part in node.sums]
        parts += [self._named(node.direct)] * bool(node.direct)
        return f"({' + '.join(parts)})"

    def _named(self, group: tuple[int, ...]) -> str:
        products = tree.ranges(self.products_in(group))
        return ", ".join(filter(None, [products, "C" * (self.lab.depth in group)]))

    def products_in(self, group: Sequence[int]) -> list[int]:
        """The leaves of a group that are products."""
        return [leaf for leaf in group if leaf < self.lab.depth]

    @property
    def sizes(self) -> list[int]:
        """The numbers of products that are added at once, the largest first."""
        return sorted({len(self.products_in(group)) for group in self.groups} - {0}, reverse=True)

    @cached_property
    def first(self) -> list[int]:
        """The products of the first group with the most products."""
        return max(map(self.products_in, self.groups), key=len, default=[])

    @cached_property
    def place_of_c(self) -> int | None:
        """The number of the group that the accumulator is in."""
        return next(
            (number for number, group in enumerate(self.groups) if self.lab.depth in group), None
        )
