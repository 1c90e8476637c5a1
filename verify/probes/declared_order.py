"""Whether the tree of a sum is one that a declared order allows (docs/tolerance-backward.md, *Sums
in a declared order*)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

from verify.probes.tree import Node, ranges

Steps = list[list[int]]
"""Leaves in the order in which they are added; those of one step in any order among themselves."""


def contradicts(tree: Node, steps: Sequence[Sequence[int]], order: str) -> str:
    """Why no sum of that order has this tree, or "".

    steps: the leaves of each step, by position.  order: "ascending" or "whole_first", as
    `GradientOrder` has them.
    """
    reasons = (misfit(tree, turned) for turned in _turned([list(step) for step in steps], order))
    first = next(reasons)
    return "" if not first or any(not reason for reason in reasons) else first


def _turned(steps: Steps, order: str) -> Iterator[Steps]:
    """The steps in every sequence that the order allows, ascending first: whole blocks lie
    together, and come before those in front of them."""
    yield steps
    if order == "whole_first":
        for a, b in combinations_with_replacement(range(len(steps) + 1), 2):
            yield steps[a:b] + steps[:a] + steps[b:]


def misfit(tree: Node, steps: Steps) -> str:
    """Why the tree does not add these steps one after the other to one running sum, or ""."""
    place = {leaf: number for number, step in enumerate(steps) for leaf in step}
    counts = [0]
    for step in steps:
        counts.append(counts[-1] + len(step))
    return next(filter(None, (_of_node(node, place, counts) for node in _nodes(tree))), "")


def _nodes(node: Node) -> Iterator[Node]:
    """The sums of the tree, inner ones first."""
    for part in node.sums:
        yield from _nodes(part)
    if node.children:
        yield node


def _of_node(node: Node, place: dict[int, int], counts: Sequence[int]) -> str:
    last = max(place[leaf] for leaf in node.leaves)
    earlier = [leaf for leaf in node.leaves if place[leaf] < last]
    if not earlier:
        return ""  # within one step
    if len(earlier) != counts[last]:
        return f"{ranges(node.leaves)} are added up without all that comes before the last of them"
    if sum(any(place[leaf] < last for leaf in child.leaves) for child in node.children) > 1:
        return f"{ranges(earlier)} are no sum of their own before {_rest(node, place, last)}"
    return ""


def _rest(node: Node, place: dict[int, int], last: int) -> str:
    return ranges([leaf for leaf in node.leaves if place[leaf] == last])
