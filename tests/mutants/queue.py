"""Which mutants are hunted next: those of the ground that takes longest first, each process on one
ground as long as that has any, whose questions and truths it knows."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.mutants.mutant import Mutant
from tests.mutants.record import Entry

Batch = tuple[Mutant, ...]
_UNKNOWN = 60.0  # seconds of a mutant of a ground of which none is on record


class Queue:
    """The mutants that are left, in batches that one process takes at once.

    ground: of a mutant.  together: mutants of a batch.  entries: the record, which tells what a
    mutant of a ground takes.
    """

    def __init__(
        self,
        left: Sequence[Mutant],
        ground: Callable[[Mutant], str],
        together: int,
        seconds: Mapping[str, float],
    ) -> None:
        self._seconds = seconds
        self._left: dict[str, deque[Batch]] = {}
        self._working: Counter[str] = Counter()
        by_ground: dict[str, list[Mutant]] = {}
        for mutant in left:
            by_ground.setdefault(ground(mutant), []).append(mutant)
        for name, mutants in by_ground.items():
            starts = range(0, len(mutants), together)
            self._left[name] = deque(tuple(mutants[n : n + together]) for n in starts)

    def __len__(self) -> int:
        """The number of batches that are left."""
        return sum(map(len, self._left.values()))

    def take(self, last: str | None) -> tuple[str, Batch] | None:
        """The next batch and its ground, for a process that had one of `last` before."""
        open_ = [name for name, batches in self._left.items() if batches]
        if not open_:
            return None
        if last not in open_:
            if last is not None:
                self._working[last] -= 1
            last = max(open_, key=self._share)
            self._working[last] += 1
        return last, self._left[last].popleft()

    def _share(self, name: str) -> float:
        """The seconds that one more process would have on a ground."""
        each = self._seconds.get(name, _UNKNOWN)
        return each * len(self._left[name]) / (1 + self._working[name])


def usual_seconds(
    mutants: Iterable[Mutant], ground: Callable[[Mutant], str], entries: Mapping[str, Entry]
) -> dict[str, float]:
    """What a mutant of each ground took on average, of those on record."""
    found: dict[str, list[float]] = {}
    for mutant in mutants:
        if mutant.id in entries:
            found.setdefault(ground(mutant), []).append(entries[mutant.id].seconds)
    return {name: statistics.mean(seconds) for name, seconds in found.items()}
