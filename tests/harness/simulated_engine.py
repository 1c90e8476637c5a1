"""An engine of simulated workers in one process and in simulated time, for tests and figures.

Leases take seconds of a clock that jumps from event to event; orders, evidence and news are what an
engine's are.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verify.campaign.leases.engine import (
    Arrived,
    Checked,
    Fails,
    Gone,
    News,
    Said,
    Told,
    Worked,
)
from verify.campaign.leases.executor import Spec
from verify.campaign.leases.plan import Unit
from verify.campaign.leases.requests import Answer, Check, Hello, Work
from verify.evidence import strict_json

SLUG = "nvidia-h100-80gb-hbm3"


def header(slug: str = SLUG) -> bytes:
    """What a session says of itself, as evidence."""
    return (
        strict_json.dumps(
            {
                "kind": "run",
                "run": "leases",
                "started": "20260101T000000Z",
                "profile": "gpu",
                "device": {"slug": slug, "kind": "cuda", "name": slug},
                "versions": {},
                "schema": 1,
            }
        ).encode()
        + b"\n"
    )


def units(count: int, families: int = 8) -> tuple[Unit, ...]:
    """Tests of a simulated campaign."""
    return tuple(Unit(f"test[k{n % families}-{n}]", True, f"k{n % families}") for n in range(count))


@dataclass
class Simulated:
    """Simulated workers.

    seconds: of a lease.  evidence: of a lease.  wrong: workers whose control problem is wrong from
    that lease of theirs on.  failing, dying, erring: whether a lease fails, kills its worker, or
    cannot be done, by worker and order.
    """

    workers: int = 3
    tests: Sequence[Unit] = field(default_factory=lambda: units(6))
    seconds: Callable[[random.Random], float] = lambda draw: 1.0
    evidence: Callable[[Work], bytes] = lambda order: b""
    wrong: dict[str, int] = field(default_factory=dict)
    failing: Callable[[str, Work], bool] = lambda worker, order: False
    dying: Callable[[str, Work], bool] = lambda worker, order: False
    erring: Callable[[str, Work], bool] = lambda worker, order: False
    sources: dict[str, str] = field(default_factory=dict)  # worker -> another hash than "same"
    slugs: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)  # worker -> times slower
    start: dict[str, float] = field(default_factory=dict)  # worker -> seconds of its session's
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0
    given: list[tuple[str, Work]] = field(default_factory=list)
    told: list[tuple[tuple[str, ...], Told, str]] = field(default_factory=list)
    _events: list[tuple[float, int, News]] = field(default_factory=list)
    _count: int = 0
    _did: dict[str, int] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _stopped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for n in range(self.workers):
            self._at(0.0, Arrived(f"w{n}"))

    def clock(self) -> float:
        return self.now

    def news(self, seconds: float) -> Sequence[News]:
        until = self.now + seconds
        self.now = max(self.now, min(until, self._events[0][0]) if self._events else until)
        found = []
        while self._events and self._events[0][0] <= self.now:
            found.append(heapq.heappop(self._events)[2])
        return found

    def hello(self, worker: str, spec: Spec) -> None:
        slug = self.slugs.get(worker, SLUG)
        hello = Hello(
            device={"slug": slug},
            uuid=f"GPU-{worker.partition('+')[0]}",
            units=tuple(self.tests),
            kernels="kernels",
            sources=self.sources.get(worker, "same"),
        )
        said = Said(worker, host="host", name=worker, hello=hello, header=header(slug))
        self._at(self.start.get(worker, 0.1), said)

    def check(self, worker: str, request: Check) -> None:
        bad = self._did.get(worker, 0) >= self.wrong.get(worker, 1 << 30)
        text = "the control problem is wrong in 1 of 4096 rows" if bad else ""
        self._at(0.1, Checked(worker, Answer(seconds=0.1, wrong=text)))

    def work(self, worker: str, request: Work) -> None:
        assert worker not in self._dead
        self.given.append((worker, request))
        seconds = self.seconds(self.draw) * self.slow.get(worker, 1.0)
        self._did[worker] = self._did.get(worker, 0) + 1
        if self.dying(worker, request):
            self._dead.add(worker)
            self._at(seconds, Gone(worker))
            self._at(seconds + 1.0, Arrived(f"{worker}+"))
            return
        lines = self.evidence(request)
        if self.failing(worker, request):
            line = b'{"outcome":"fail"}\n'
            lines += line
            self._at(seconds / 2, Fails(worker, line))
        errors = (("", request.node, "no device"),) if self.erring(worker, request) else ()
        drawn = () if errors else (("variant", "float16", "accuracy", 2, 0),)
        answer = Answer(seconds=seconds, drawn=drawn, errors=errors)
        self._at(seconds, Worked(worker, request.lease, answer, lines))

    def tell(self, workers: Sequence[str], what: Told, test: str = "") -> None:
        self.told.append((tuple(sorted(workers)), what, test))

    def close(self) -> None:
        pass

    def _at(self, seconds: float, news: News) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, news))
