"""The coordinator: gives leases to an engine's workers, merges their evidence, and keeps the
journal.

It runs in the process of `verify campaign`, imports no torch, and is the only writer of the
campaign's directory.  It can be killed at any moment: the same command goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median

import msgspec

from verify.campaign.leases import engine as news
from verify.campaign.leases import journal
from verify.campaign.leases.engine import Engine
from verify.campaign.leases.events import Begun, Done, Drawn, Event, Failed, Joined
from verify.campaign.leases.executor import Spec
from verify.campaign.leases.merged import Merged
from verify.campaign.leases.requests import Check, Hello, Work
from verify.campaign.leases.state import Leases

_POLL = 0.5  # seconds
_CONTROL_EVERY = 600.0  # seconds between two control problems of a device
_SLOW, _SLOW_LEAST = 5.0, 60.0  # times the median of leases, and seconds, until one is given again
_BEGIN, _FAIL = b'"kind":"begin"', b'"outcome":"fail"'
_FEW, _MANY = 20, 200  # leases whose seconds say what is usual: the last ones


class ContinuedError(Exception):
    """A campaign cannot go on: the command asks something else now; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command asks.

    sources: the hash that every worker must report.  exit_first: give nothing more once a verdict
    fails.  until: in seconds of time.monotonic(), after which no lease is given.  patience: seconds
    to wait for a worker while there is none.
    """

    spec: Spec
    seeds: tuple[int, ...]
    sources: str
    exit_first: bool = False
    until: float | None = None
    patience: float = 600.0

    @property
    def asked(self) -> str:
        """One hash of what decides which leases there are, and what they mean."""
        decides = (
            *(self.spec.arguments, self.spec.files, self.spec.kinds, self.spec.failures),
            *(sorted(self.spec.variables.items()), self.sources),
        )
        return sha256(repr(decides).encode()).hexdigest()[:12]


@dataclass
class Coordinator:
    """One campaign under way.

    say: gets each line for the user.  tick: called after each round of news.  clock: in seconds.
    """

    plan: Plan
    merged: Merged
    engine: Engine
    say: Callable[[str], None] = lambda line: None
    tick: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    state: Leases = field(default_factory=Leases)
    started: str = ""
    usage: str = ""
    """Why the command itself cannot be carried out, once a worker has said so."""
    refused: dict[str, str] = field(default_factory=dict)
    cases: int = 0
    failing: int = 0
    stopping: bool = False
    _admitted: dict[str, Joined] = field(default_factory=dict)  # gone ones, too
    _greeting: set[str] = field(default_factory=set)  # their sessions start
    _checking: set[str] = field(default_factory=set)
    _checked: dict[str, float] = field(default_factory=dict)  # device -> when
    _accusing: set[str] = field(default_factory=set)  # devices that have just failed a new test
    _known: set[str] = field(default_factory=set)  # tests with a failing example
    _since: dict[str, float] = field(default_factory=dict)  # lease -> when it was given
    _seconds: list[float] = field(default_factory=list)  # of the last leases
    _usual: float = _SLOW_LEAST
    _slow: set[str] = field(default_factory=set)
    _journal: journal.Journal | None = None

    def open(self) -> None:
        """Read the journal, if the campaign was begun before, and continue it.

        Raises ContinuedError, journal.JournalError and OSError.
        """
        directory = self.merged.directory
        for event in journal.read(directory):
            if isinstance(event, Begun):
                self._refuse_other(event)
                self.started = self.started or event.started
            elif isinstance(event, Done):
                self.cases += event.cases
                self.failing += event.failing
            self.state.apply(event)
        self.started = self.started or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._journal = journal.Journal(directory)
        self.state.emit = self._journal.append
        begun = Begun(self.plan.asked, self.plan.seeds, self.started)
        self._journal.append(begun)
        self.state.apply(begun)
        for worker in list(self.state.workers):
            self.state.leave(worker)  # of a coordinator that was killed
        for kind in self.state.units:
            for device in self.state.quarantined:
                self.merged.drop(kind, device)

    def run(self) -> None:
        """Judge until every lease is done or broken, or the campaign stops.  Raises
        engine.EngineError."""
        alone_since = self.clock()
        while not self._over():
            for each in self.engine.news(_POLL):
                self._take(each)
            if self.plan.until is not None and self.clock() > self.plan.until:
                self.stop()
            self._slow = self._slow_ones()
            for worker in list(self.state.workers):
                self._feed(worker)
            if self.state.workers or self._greeting:
                alone_since = self.clock()
            self.tick()
            if self.clock() - alone_since > self._patience():
                break

    def close(self) -> None:
        """Give back what is under way, and close the files."""
        for worker in list(self.state.workers):
            self.state.leave(worker, lost=False, time=time.time())
        self.merged.close()
        if self._journal is not None:
            self._journal.close()

    def stop(self) -> None:
        """Give no further lease, and let those under way end early."""
        if not self.stopping:
            self.stopping = True
            self.engine.tell(list(self.state.workers), "stop")

    def events(self) -> Iterator[Event]:
        """All events so far."""
        return journal.read(self.merged.directory)

    def _refuse_other(self, before: Begun) -> None:
        if before.asked != self.plan.asked or before.seeds != self.plan.seeds:
            raise ContinuedError(
                f"campaign {self.merged.directory.name} was begun with other options, files, seeds"
                " or sources: give the same, or another --run-id"
            )

    def _over(self) -> bool:
        if self.usage:
            return True
        at_work = any(not self.state.idle(worker) for worker in self.state.workers)
        if self.stopping:
            return not at_work and not self._checking
        if not self.state.units or self.state.open:
            return False
        return not self._checking and not any(
            self.state.unchecked[joined.device] for joined in self.state.workers.values()
        )

    def _patience(self) -> float:
        return min(self.plan.patience, 5.0) if self.refused else self.plan.patience

    # News

    def _take(self, said: news.News) -> None:
        match said:
            case news.Arrived():
                self._greeting.add(said.worker)
                self.engine.hello(said.worker, self.plan.spec)
            case news.Gone():
                self._gone(said.worker)
            case news.Said():
                self._admit(said)
            case news.Checked():
                self._control(said)
            case news.Worked():
                self._end(said)
            case news.Fails():
                self._fails(said)

    def _gone(self, worker: str) -> None:
        self._checking.discard(worker)
        self._greeting.discard(worker)
        if worker in self.state.workers:
            joined = self.state.workers[worker]
            self.say(f"worker {worker} ({joined.device}) is gone")
            self.state.leave(worker, time=time.time())

    def _admit(self, said: news.Said) -> None:
        self._greeting.discard(said.worker)
        hello = said.hello
        if hello is None:
            self.usage = said.failed if said.usage and not self.state.units else ""
            self._refuse(said.worker, said.failed)
            return
        if hello.unusable:
            self.usage = hello.unusable
            return
        if not hello.units:
            self.usage = "nothing matches: the campaign has no test"
            return
        kind = str(hello.device["slug"])
        joined = Joined(
            worker=said.worker,
            kind=kind,
            device=f"{said.host}/{hello.uuid or said.name}",
            host=said.host,
            pid=said.pid,
            time=time.time(),
        )
        why = self._differs(hello) or self.state.plan(kind, hello.units, hello.kernels)
        why = why or self.state.join(joined)
        if why is not None:
            self._refuse(said.worker, why)
            return
        self.refused.pop(said.worker, None)
        self._admitted[said.worker] = joined
        self.merged.begin(kind, said.header, self.started)
        self._check(said.worker)

    def _differs(self, hello: Hello) -> str | None:
        """Why a worker's files are not this command's, or None."""
        if hello.sources == self.plan.sources:
            return None
        return (
            f"its sources ({hello.sources}) are not those of this command ({self.plan.sources}):"
            " install the same verify and the same kernel files there"
        )

    def _refuse(self, worker: str, why: str) -> None:
        self.refused[worker] = why
        self.state.refuse(worker, why)
        self.say(f"worker {worker} gets no lease: {why}")

    def _check(self, worker: str) -> None:
        self._checking.add(worker)
        device = self.state.workers[worker].device
        number = sum(device.encode()) + int(time.time())
        self.engine.check(worker, Check(number % (1 << 31)))

    def _control(self, said: news.Checked) -> None:
        self._checking.discard(said.worker)
        joined = self.state.workers.get(said.worker)
        if joined is None:
            return
        if said.answer.errors:  # its session died
            self.state.leave(said.worker, time=time.time())
            self._refuse(said.worker, said.answer.errors[0][2])
            return
        if said.answer.wrong:
            self.state.quarantine(joined.device, said.answer.wrong)
            self._leave_out()
            return
        self._checked[joined.device] = self.clock()
        self._accusing.discard(joined.device)
        self.state.right(joined.device, said.answer.seconds)

    def _leave_out(self) -> None:
        """Take the evidence of quarantined devices out, and say so."""
        for joined in list(self._admitted.values()):
            why = self.state.quarantined.get(joined.device)
            if why is not None:
                del self._admitted[joined.worker]
                self._checking.discard(joined.worker)
                self.merged.drop(joined.kind, joined.device)
                self.engine.tell([joined.worker], "stop")
                self.say(f"{joined.device} ({joined.kind}) is quarantined: {why}")

    def _end(self, said: news.Worked) -> None:
        joined = self._admitted.get(said.worker)
        self._since.pop(said.lease, None)
        if joined is None:
            return  # quarantined
        self.merged.append(joined.kind, joined.device, said.evidence)
        answer = said.answer
        failing = said.evidence.count(_FAIL)
        if answer.errors:
            variant, test, message = answer.errors[0]
            failed = Failed(said.lease, said.worker, joined.device, message, test, variant)
            self.state.fail(failed)
        elif answer.stopped:
            self.state.take_back(said.lease, said.worker)
        else:
            done = Done(
                lease=said.lease,
                worker=said.worker,
                device=joined.device,
                seconds=answer.seconds,
                cases=said.evidence.count(_BEGIN),
                failing=failing,
                drawn=tuple(Drawn(*each) for each in answer.drawn),
            )
            self.state.finish(done)
            self._seconds = [*self._seconds[1 - _MANY :], answer.seconds]
            self._usual = max(_SLOW * median(self._seconds), _SLOW_LEAST)
            self.cases += done.cases
            self.failing += done.failing
        self._leave_out()
        if failing:
            self._share(said.worker, said.lease)

    def _fails(self, said: news.Fails) -> None:
        joined = self._admitted.get(said.worker)
        if joined is None:
            return
        self.merged.append(joined.kind, joined.device, said.line)
        for lease in self.state.held(said.worker):
            self._share(said.worker, lease)

    def _share(self, worker: str, lease: str) -> None:
        """Tell all others of a failing example: its test is not shrunk twice; or the campaign ends
        there.  Its device judges the control problem next."""
        if self.plan.exit_first:
            self.stop()
        test = self.state.all[lease].unit.node
        if test not in self._known:
            self._known.add(test)
            self._accusing.add(self._admitted[worker].device)
            others = [each for each in self.state.workers if each != worker]
            self.engine.tell(others, "known", test)

    # Work

    def _feed(self, worker: str) -> None:
        """Give an idle worker something to do."""
        if worker in self._checking or not self.state.idle(worker):
            return
        device = self.state.workers[worker].device
        if self.state.unchecked[device] and self._control_is_due(device):
            self._check(worker)
            return
        if self.stopping or device not in self._checked:
            return
        lease = self.state.give(worker)
        if lease is not None:
            self._since[lease.id] = self.clock()
        elif self._slow:
            lease = self.state.give_again(worker, self._slow.__contains__)
        if lease is None:
            return
        unit = lease.unit
        order = Work(lease.id, unit.node, lease.seed, shrinks=unit.node not in self._known)
        self.engine.work(worker, order)

    def _control_is_due(self, device: str) -> bool:
        last = self._checked.get(device, 0.0)
        return (
            device in self._accusing or not self.state.open or self.clock() - last > _CONTROL_EVERY
        )

    def _slow_ones(self) -> set[str]:
        """The leases under way for much longer than is usual."""
        if len(self._seconds) < _FEW:
            return set()
        before = self.clock() - self._usual
        return {lease for lease, since in self._since.items() if since < before}


def remember(path: Path, data: object) -> None:
    """Write JSON data to a file as a whole."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
