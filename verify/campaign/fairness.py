"""The order of a campaign whose time is limited: whenever it ends, each variant and dtype has been
asked about as much as any other.

The usual order (`verify.machine.dealing`) asks one question of all targets before the next: after a
short time the last dtypes, and most groups of oracles, have been asked nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What a test asks.  question: the same for all targets of a test function.  long: it takes
    long, so that it must not be among the last."""

    variant: str
    dtype: str
    question: str
    long: bool = False


def fair(items: Sequence[T], asked: Callable[[T], Asked | None], workers: int) -> list[T]:
    """Order the items for so many workers: those that ask no target, then in rounds one of each
    variant and dtype.

    Variants take turns, then their dtypes; neighbours ask different questions.  The order follows
    from the items alone.
    """
    others = [item for item in items if asked(item) is None]
    by_variant: dict[str, dict[str, list[tuple[T, Asked]]]] = {}
    for item in items:
        what = asked(item)
        if what is not None:
            of_variant = by_variant.setdefault(what.variant, {})
            of_variant.setdefault(what.dtype, []).append((item, what))
    dtypes = [_turned([*by_dtype.values()], n) for n, by_dtype in enumerate(by_variant.values())]
    pairs = in_turns(dtypes)
    queues = [_questions(tests, n) for n, tests in enumerate(pairs)]
    rounds = max(map(len, queues), default=0)
    order = list(others)
    for number in range(rounds):
        turn = [queue[number] for queue in queues if number < len(queue)]
        if number:  # shuffled, so that a worker does not get the same pairs in every round
            Random(number).shuffle(turn)
        order += turn
    return _for_workers(order, workers)


def in_turns(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [each[n] for n in range(longest) for each in lists if n < len(each)]


def _questions(tests: Sequence[tuple[T, Asked]], number: int) -> list[T]:
    """The tests of the variant and dtype of that number: their questions take turns, each pair
    begins with another one, and long ones do not come last."""
    by_question: dict[tuple[bool, str], list[T]] = {}
    for item, what in tests:
        by_question.setdefault((what.long, what.question), []).append(item)
    short, long = (
        in_turns(
            _turned([each for (kind, _), each in by_question.items() if kind is wanted], number)
        )
        for wanted in (False, True)
    )
    each = -(-len(long) // max(len(short) - 1, 1))  # long ones after a short one
    order = []
    for n, item in enumerate(short):
        order += [item, *long[n * each : (n + 1) * each]]
    return order if short else long


def _turned(items: Sequence[T], by: int) -> list[T]:
    """The items, beginning with another one."""
    begin = by % len(items) if items else 0
    return [*items[begin:], *items[:begin]]


def _for_workers(order: list[T], workers: int) -> list[T]:
    """The order in which xdist's workers, which get one part of it each, follow this one together.

    If the parts are not equal, xdist gives the last workers more.
    """
    return [item for n in reversed(range(workers)) for item in order[n::workers]]
