"""Dealing: the order of tests in which parallel workers end at about the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain, groupby
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
    last items of another's part.  So each part begins with its share of the long items, the longest
    first; neighbours of one kin go to one worker, which does once what they have in common.  The
    others, for which seconds(item) is 0, follow in their order.
    """
    if shares < 2:
        return items
    long = sorted((item for item in items if seconds(item)), key=seconds, reverse=True)
    kins = [list(run) for _, run in groupby(long, key=lambda item: (seconds(item), kin(item)))]
    short = [item for item in items if not seconds(item)]
    size = -(-len(short) // shares)
    runs = [
        [*chain.from_iterable(kins[n::shares]), *short[n * size : (n + 1) * size]]
        for n in range(shares)
    ]
    return [item for run in runs for item in run]
