"""Dealing: the order of tests in which parallel workers end at about the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain, groupby, islice
from typing import TypeVar

T = TypeVar("T")


def alone(item: object) -> Hashable:
    """Each item is its only kin."""
    return item


def dealt(
    items: list[T],
    seconds: Callable[[T], float],
    shares: int,
    kin: Callable[[T], Hashable] = alone,
) -> list[T]:
    """Order the items so that `shares` workers end at about the same time.

    xdist first gives every worker an equal part of the items; a worker without work then takes the
    last items of another's part.  So each part begins with long items: the longest kin goes to the
    worker with the fewest seconds so far, then the next one.  Items of one kin that follow each
    other go to one worker, which does once what they have in common.  The others, for which
    seconds(item) is 0, follow in their order.
    """
    if shares < 2:
        return items
    timed = [(seconds(item), item) for item in items]
    long = sorted((pair for pair in timed if pair[0]), key=lambda pair: pair[0], reverse=True)
    kins = [list(run) for _, run in groupby(long, key=lambda pair: (pair[0], kin(pair[1])))]
    sizes = [(len(items) + n) // shares for n in range(shares)]  # of xdist's parts
    parts: list[list[T]] = [[] for _ in sizes]
    loads = [0.0] * shares
    for run in sorted(kins, key=_sum, reverse=True):
        room = [n for n in range(shares) if len(parts[n]) + len(run) <= sizes[n]]
        n = min(room or range(shares), key=loads.__getitem__)
        parts[n] += [item for _, item in run]
        loads[n] += _sum(run)
    short = (item for taken, item in timed if not taken)
    for part, size in zip(parts, sizes, strict=True):
        part.extend(islice(short, max(size - len(part), 0)))
    return [*chain.from_iterable(parts), *short]


def _sum(run: list[tuple[float, T]]) -> float:
    return sum(taken for taken, _ in run)
