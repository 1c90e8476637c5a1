"""History: what the one life of a cell has run so far, for a failure that may need earlier calls.

A kernel that breaks its process may fail, or make another variant of its file fail, long after.  So a
finding holds the cases before it in the same life, and a crash is repeated where nothing ran before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST = 32  # cases that are remembered; all are counted


@dataclass(frozen=True)
class Before:
    """The cases that a life had run before a launch: the last `MOST` ids, in order, and how many there were."""

    cases: tuple[str, ...] = ()
    count: int = 0

    @property
    def told(self) -> str:
        """For a reader: how many, and which variants they were of."""
        if not self.count:
            return "nothing had run before it in that process"
        variants = ", ".join(dict.fromkeys(case.rsplit(":", 3)[0] for case in self.cases))
        kept = "" if self.count == len(self.cases) else f", the last {len(self.cases)} of which are on record"
        return f"{self.count} cases had run before it in that process ({variants}){kept}"


@dataclass
class History:
    """What the present life of one cell has run.  launches: of the present life, by all its cases."""

    life: int = 0
    launches: int = 0
    count: int = 0
    cases: deque[str] = field(default_factory=lambda: deque(maxlen=MOST))

    def launched(self, life: int, case: str) -> Before:
        """Note a launch of that case in the life of that number; returns the other cases before it in that life."""
        if life != self.life:
            self.life, self.launches, self.count = life, 0, 0
            self.cases.clear()
        self.launches += 1
        if not self.cases or self.cases[-1] != case:
            before = Before(tuple(self.cases), self.count)
            self.cases.append(case)
            self.count += 1
            return before
        return Before(tuple(self.cases)[:-1], self.count - 1)
