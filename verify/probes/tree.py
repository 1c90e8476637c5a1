"""A summation's tree from where its leaves meet.

The idea is that of FPRev (Xie et al., arXiv 2411.00442): put a huge M at one leaf, -M at another,
and a unit at every other.  A unit that is added before the two have met is absorbed; one that joins
later survives.  So the sum counts the leaves that are not below the node where the two meet.  A
node with more than two children is a fused addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

Pair = tuple[int, int]
# Pairs of leaves -> the number of leaves below the node where each pair meets.
Meeting = Callable[[Sequence[Pair]], Sequence[int]]

_AT_ONCE = 64  # leaves of which all pairs are asked for together


class InconsistentError(ValueError):
    """No tree has these meetings; the message names a set of leaves that shows it."""


@dataclass(frozen=True)
class Node:
    """A sum of its children, or a leaf.  leaves: below it, ascending."""

    leaves: tuple[int, ...]
    children: tuple[Node, ...] = ()

    @property
    def own(self) -> tuple[int, ...]:
        """Leaves that are added in this node itself."""
        return tuple(child.leaves[0] for child in self.children if not child.children)

    @property
    def sums(self) -> tuple[Node, ...]:
        """Children that are sums themselves."""
        return tuple(child for child in self.children if child.children)


def reveal(leaves: Sequence[int], meeting: Meeting) -> Node:
    """The tree of the leaves.  Asks for all pairs of small sets at once, and of larger ones only
    what tells them apart."""
    return _Search(meeting).tree(tuple(leaves))


class _Search:
    """What was asked so far; sets that wait for the same answers are asked for together."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._known: dict[Pair, int] = {}

    def tree(self, leaves: tuple[int, ...]) -> Node:
        """Ask until the whole tree is known, round by round."""
        while True:
            wanted: list[Pair] = []
            found = self._node(leaves, wanted)
            if found is not None:
                return found
            asked = list(dict.fromkeys(wanted))
            self._known |= dict(zip(asked, self._meeting(asked), strict=True))

    def _node(self, leaves: tuple[int, ...], wanted: list[Pair]) -> Node | None:
        """The node of exactly these leaves; None if more must be asked: what is known of that goes
        into `wanted`."""
        if len(leaves) == 1:
            return Node(leaves)
        parts, whole = self._parts(leaves, wanted)
        if len(parts) == 1 and whole:
            raise InconsistentError(f"leaves {ranges(leaves)} never meet")
        children = [self._node(part, wanted) for part in parts]
        if not whole or any(child is None for child in children):
            return None
        return Node(leaves, tuple(child for child in children if child is not None))

    def _parts(
        self, leaves: tuple[int, ...], wanted: list[Pair]
    ) -> tuple[list[tuple[int, ...]], bool]:
        """The leaves by child, two of the same child meeting below it, as far as is known; and
        whether these are all."""
        parts: list[tuple[int, ...]] = []
        left = leaves
        while left:
            first, others = left[0], left[1:]
            asked = (
                combinations(left, 2)
                if len(left) <= _AT_ONCE
                else ((first, other) for other in others)
            )
            missing = [pair for pair in asked if pair not in self._known]
            if missing:
                wanted += missing
                return parts, False
            part = (first, *(other for other in others if self._known[first, other] < len(leaves)))
            parts.append(part)
            left = tuple(leaf for leaf in left if leaf not in part)
        self._check(parts, len(leaves))
        return parts, True

    def _check(self, parts: list[tuple[int, ...]], whole: int) -> None:
        """Leaves of one child meet below this node, those of two in it."""
        where = {leaf: number for number, part in enumerate(parts) for leaf in part}
        for (i, j), count in self._known.items():
            if (
                i in where
                and j in where
                and (count >= whole if where[i] == where[j] else count != whole)
            ):
                raise InconsistentError(
                    f"leaves {i} and {j} meet among {count} of {whole}, which no tree explains"
                )


def chain(tree: Node) -> list[tuple[int, ...]] | None:
    """The tree as a chain of groups of leaves, each added at once, the innermost first; None if
    some node adds two sums."""
    groups = []
    node: Node | None = tree
    while node is not None:
        if len(node.sums) > 1:
            return None
        groups.append(node.own)
        node = node.sums[0] if node.sums else None
    return groups[::-1]


def describe(tree: Node) -> str:
    """The tree in words: "chain of 8 fused groups of 16", or its parts where it is no chain."""
    groups = chain(tree)
    if groups is not None:
        return _chain_in_words([len(group) for group in groups])
    alike = blocks(tree)
    if alike:
        first = alike[0]
        return (
            f"{len(alike)} blocks of {len(first.leaves)}, added one after the other; each:"
            f" {describe(first)}"
        )
    own = f" and {len(tree.own)} single leaves" if tree.own else ""
    if len({_shape(part) for part in tree.sums}) == 1:
        first = tree.sums[0]
        return (
            f"{len(tree.sums)} sums{own}, added at once; each: {describe(first)} (the first: leaves"
            f" {ranges(first.leaves)})"
        )
    parts = "; ".join(f"leaves {ranges(part.leaves)}: {describe(part)}" for part in tree.sums)
    return f"{len(tree.sums)} sums{own}, added at once; {parts}"


def blocks(tree: Node) -> list[Node]:
    """Sums of the same shape that the tree adds two at a time, one after the other, the first
    first; empty if it does not."""
    found: list[Node] = []
    node = tree
    while len(node.sums) == len(node.children) == 2:
        rest, block = sorted(node.sums, key=lambda part: (-len(part.leaves), part.leaves[0]))
        found.append(block)
        node = rest
        if _shape(node) == _shape(block):
            break
    found.append(node)
    return found[::-1] if len({_shape(block) for block in found}) == 1 and len(found) > 1 else []


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
    words = [
        f"{n} fused group{'s' * (n > 1)} of {size}" if size > 1 else f"{n} single"
        for size, n in runs
    ]
    return f"chain of {', then '.join(words)}"


def _shape(tree: Node) -> tuple[object, ...]:
    """What two trees that differ only in their leaves' names have in common."""
    return (len(tree.own), *sorted((_shape(part) for part in tree.sums), key=repr))


def ranges(leaves: Sequence[int]) -> str:
    """Numbers as "0-7, 12", in the order given."""
    runs: list[list[int]] = []
    for leaf in leaves:
        if runs and leaf == runs[-1][1] + 1:
            runs[-1][1] = leaf
        else:
            runs.append([leaf, leaf])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
