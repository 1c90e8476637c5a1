"""Finds the tree of a summation from the nodes at which pairs of leaves meet.

The idea is from FPRev (Xie et al., arXiv 2411.00442): put a huge M at one leaf, -M at another, and
a unit at all others.  A unit that is added before M and -M have met is absorbed; one that is added
later survives.  So the sum counts the leaves that are not below the node where M and -M meet.  A
node with more than two children is a fused addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

Pair = tuple[int, int]
# Pairs of leaves -> the number of leaves below the node where each pair meets.
Meeting = Callable[[Sequence[Pair]], Sequence[int]]

_AT_ONCE = 64  # leaves; up to this number all pairs are asked for in one round


class InconsistentError(ValueError):
    """No tree has these meeting nodes; the message names leaves that show it."""


@dataclass(frozen=True)
class Node:
    """A sum of its children, or a leaf.  leaves: all leaves below it, ascending."""

    leaves: tuple[int, ...]
    children: tuple[Node, ...] = ()

    @property
    def direct(self) -> tuple[int, ...]:
        """The leaves that are children of this node."""
        return tuple(child.leaves[0] for child in self.children if not child.children)

    @property
    def sums(self) -> tuple[Node, ...]:
        """The children that are sums."""
        return tuple(child for child in self.children if child.children)


def reveal(leaves: Sequence[int], meeting: Meeting) -> Node:
    """The tree of the leaves.  For small sets it asks for all pairs in one round, for larger ones
    only for the pairs that it needs."""
    return _Search(meeting).tree(tuple(leaves))


class _Search:
    """The answers so far; questions about several sets are asked in one round."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._known: dict[Pair, int] = {}

    def tree(self, leaves: tuple[int, ...]) -> Node:
        """Ask in rounds until the complete tree is known."""
        while True:
            missing: list[Pair] = []
            root = self._node(leaves, missing)
            if root is not None:
                return root
            pairs = list(dict.fromkeys(missing))
            self._known |= dict(zip(pairs, self._meeting(pairs), strict=True))

    def _node(self, leaves: tuple[int, ...], missing: list[Pair]) -> Node | None:
        """The node of exactly these leaves, or None if pairs are missing, which are appended to
        `missing`."""
        if len(leaves) == 1:
            return Node(leaves)
        parts, complete = self._parts(leaves, missing)
        if len(parts) == 1 and complete:
            raise InconsistentError(f"leaves {ranges(leaves)} never meet")
        children = [self._node(part, missing) for part in parts]
        if not complete or any(child is None for child in children):
            return None
        return Node(leaves, tuple(child for child in children if child is not None))

    def _parts(
        self, leaves: tuple[int, ...], wanted: list[Pair]
    ) -> tuple[list[tuple[int, ...]], bool]:
        """The leaves of each child as far as they are known, and whether that is complete.

        Two leaves of the same child meet below this node.
        """
        parts: list[tuple[int, ...]] = []
        remaining = leaves
        while remaining:
            first, others = remaining[0], remaining[1:]
            pairs = (
                combinations(remaining, 2)
                if len(remaining) <= _AT_ONCE
                else ((first, other) for other in others)
            )
            missing = [pair for pair in pairs if pair not in self._known]
            if missing:
                wanted += missing
                return parts, False
            part = (first, *(other for other in others if self._known[first, other] < len(leaves)))
            parts.append(part)
            remaining = tuple(leaf for leaf in remaining if leaf not in part)
        self._check(parts, len(leaves))
        return parts, True

    def _check(self, parts: list[tuple[int, ...]], size: int) -> None:
        """Check that leaves of one child meet below this node, and leaves of two children in it.

        Raises InconsistentError.
        """
        where = {leaf: number for number, part in enumerate(parts) for leaf in part}
        for (i, j), count in self._known.items():
            if (
                i in where
                and j in where
                and (count >= size if where[i] == where[j] else count != size)
            ):
                raise InconsistentError(
                    f"leaves {i} and {j} meet among {count} of {size}, which no tree explains"
                )


def chain(tree: Node) -> list[tuple[int, ...]] | None:
    """The tree as a chain of groups of leaves, the innermost first; None if a node adds two sums.

    The leaves of a group are added in one fused addition.
    """
    groups = []
    node: Node | None = tree
    while node is not None:
        if len(node.sums) > 1:
            return None
        groups.append(node.direct)
        node = node.sums[0] if node.sums else None
    return groups[::-1]


def describe(tree: Node) -> str:
    """The tree as text: "chain of 8 fused groups of 16", or its parts if it is not a chain."""
    groups = chain(tree)
    if groups is not None:
        return _chain_in_words([len(group) for group in groups])
    equal = blocks(tree)
    if equal:
        first = equal[0]
        return (
            f"{len(equal)} blocks of {len(first.leaves)}, added one after the other; each:"
            f" {describe(first)}"
        )
    single = f" and {len(tree.direct)} single leaves" if tree.direct else ""
    if len({_shape(part) for part in tree.sums}) == 1:
        first = tree.sums[0]
        return (
            f"{len(tree.sums)} sums{single}, added at once; each: {describe(first)} (the first:"
            f" leaves {ranges(first.leaves)})"
        )
    parts = "; ".join(f"leaves {ranges(part.leaves)}: {describe(part)}" for part in tree.sums)
    return f"{len(tree.sums)} sums{single}, added at once; {parts}"


def blocks(tree: Node) -> list[Node]:
    """Sums of the same shape that the tree adds one after the other, in that order; [] if the tree
    is not built like that."""
    parts: list[Node] = []
    node = tree
    while len(node.sums) == len(node.children) == 2:
        rest, block = sorted(node.sums, key=lambda part: (-len(part.leaves), part.leaves[0]))
        parts.append(block)
        node = rest
        if _shape(node) == _shape(block):
            break
    parts.append(node)
    return parts[::-1] if len({_shape(block) for block in parts}) == 1 and len(parts) > 1 else []


def _chain_in_words(sizes: list[int]) -> str:
    if len(sizes) == 1:
        return "one addition of 2" if sizes == [2] else f"one fused addition of {sizes[0]}"
    if sizes == [2] + [1] * (len(sizes) - 1):
        return "one after the other"
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    parts = [
        f"{n} fused group{'s' * (n > 1)} of {size}" if size > 1 else f"{n} single"
        for size, n in runs
    ]
    return f"chain of {', then '.join(parts)}"


def _shape(tree: Node) -> tuple[object, ...]:
    """A value that is equal for trees that differ only in their leaves' numbers."""
    return (len(tree.direct), *sorted((_shape(part) for part in tree.sums), key=repr))


def ranges(leaves: Sequence[int]) -> str:
    """Numbers as text such as "0-7, 12", in their order."""
    runs: list[list[int]] = []
    for leaf in leaves:
        if runs and leaf == runs[-1][1] + 1:
            runs[-1][1] = leaf
        else:
            runs.append([leaf, leaf])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
