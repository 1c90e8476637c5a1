"""A crew: processes that share a hunt.  Each is a fresh interpreter, so that none forks another
that has used threads; one process hands out mutants and writes the record.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType
from unittest.mock import patch

from tests.mutants import record
from tests.mutants.languages import LANGUAGES, Language
from tests.mutants.mutant import Mutant
from tests.mutants.queue import Batch, Queue, usual_seconds
from tests.mutants.record import Entry
from verify.machine.leash import die_with

_SPAWN = multiprocessing.get_context("spawn")
_MEMORY = 3.0  # GB that a process may have had: then another goes on
_TRIES = 2  # processes that may end before their time, until the crew gives up
_WAIT = 60.0  # seconds of one wait for processes
_PATIENCE = 3.0  # seconds for a process to end that is asked to
_QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # there are as many processes as cores


class Stopped(BaseException):
    """SIGINT or SIGTERM has come."""


@dataclass
class _Member:
    """A process of the crew.

    ground: of the mutants that it had last.  batch: those that it has.  told: how many of the
    crew's finds it knows.
    """

    process: SpawnProcess
    pipe: Connection
    ground: str | None = None
    batch: Batch = ()
    told: int = 0

    def end(self) -> None:
        """End it, and what it has started."""
        self.pipe.close()
        self.process.terminate()
        self.process.join(_PATIENCE)
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


@dataclass
class Crew:
    """Hunts the mutants of a language that are left, and saves what becomes of each at once.

    end: of time.monotonic; mutants that are under way then are left.
    """

    language: Language
    left: Sequence[Mutant]
    processes: int
    end: float
    _found: dict[str, Entry] = field(default_factory=dict)
    _members: list[_Member] = field(default_factory=list)
    _lost: int = 0

    def hunt(self) -> None:
        """Hunt until all are judged, time is over, or SIGINT or SIGTERM comes; print each outcome
        and the rate."""
        begun = time.monotonic()
        try:
            with (
                _stoppable(),
                # what a process that is stopped leaves behind lies there
                tempfile.TemporaryDirectory(prefix="mutants-") as place,
                patch.dict(os.environ, _QUIET | {"TMPDIR": place}),
            ):
                try:
                    self._hunt()
                finally:
                    for member in self._members:
                        member.process.terminate()
                    for member in self._members:
                        member.end()
        except Stopped:
            print("stopped")
        self._sum_up((time.monotonic() - begun) / 60)

    def _hunt(self) -> None:
        ledger = self.language.ledger
        chosen = self.language.chosen()
        entries = ledger.current(chosen)
        ground = self.language.ground
        share = math.ceil(len(self.left) / self.processes)
        together = max(1, min(self.language.together, share))
        queue = Queue(self.left, ground, together, usual_seconds(chosen, ground, entries))
        while time.monotonic() < self.end:
            while len(self._members) < self.processes and len(queue):
                self._members.append(_started(self.language, entries))
                self._give(self._members[-1], queue)
            if not self._members:
                return
            pipes = {member.pipe: member for member in self._members}
            left = min(max(self.end - time.monotonic(), 0.0), _WAIT)
            for ready in connection.wait([*pipes], left):
                assert isinstance(ready, Connection)
                self._hear(pipes[ready], queue)

    def _give(self, member: _Member, queue: Queue) -> bool:
        """Give a process its next mutants and what others have found; False if none are left."""
        taken = queue.take(member.ground)
        if taken is None:
            return False
        member.ground, member.batch = taken
        news = dict(list(self._found.items())[member.told :])
        member.told = len(self._found)
        member.pipe.send(([mutant.id for mutant in member.batch], news))
        return True

    def _hear(self, member: _Member, queue: Queue) -> None:
        """What a process has found; it gets more where that was its last mutant."""
        try:
            id_, entry, memory = member.pipe.recv()
        except EOFError:
            self._lose(member)
            return
        mutant = next(each for each in member.batch if each.id == id_)
        self._save(mutant, entry)
        member.batch = tuple(each for each in member.batch if each.id != id_)
        if not member.batch and (memory > _MEMORY or not self._give(member, queue)):
            self._members.remove(member)
            member.end()

    def _save(self, mutant: Mutant, entry: Entry) -> None:
        self._found[mutant.id] = replace(entry, seconds=round(entry.seconds, 2))
        ledger = self.language.ledger
        ledger.save(ledger.load() | self._found)
        print(
            f"{mutant.id} line {mutant.mutation.line}: {mutant.before!r} -> {mutant.after!r}:"
            f" {entry.how} {entry.by} ({entry.asked} asked, {entry.seconds:.1f} s)",
            flush=True,
        )

    def _lose(self, member: _Member) -> None:
        """A process has ended before its time: its mutants are left."""
        self._members.remove(member)
        member.end()
        names = ", ".join(mutant.id for mutant in member.batch)
        print(f"a process has ended with {member.process.exitcode}, hunting {names}", flush=True)
        self._lost += 1
        if self._lost >= _TRIES * self.processes:
            raise Stopped

    def _sum_up(self, minutes: float) -> None:
        hows = Counter(entry.how for entry in self._found.values())
        killed = hows[record.KILLED]
        survived = hows[record.SURVIVED] + hows[record.SAME]
        print(
            f"{killed} convicted, {survived} survived, {hows[record.BROKEN]} broken in"
            f" {minutes:.1f} minutes by {self.processes} processes:"
            f" {killed / max(minutes, 1e-9):.1f} convicted a minute;"
            f" {len(self.left) - len(self._found)} left",
            flush=True,
        )


def _started(language: Language, entries: Mapping[str, Entry]) -> _Member:
    ours, theirs = _SPAWN.Pipe()
    given = (language.name, dict(entries), theirs, os.getpid())
    process = _SPAWN.Process(target=_work, args=given)
    process.start()
    theirs.close()
    return _Member(process, ours)


def _work(name: str, entries: Mapping[str, Entry], pipe: Connection, crew: int) -> None:
    """Hunt what comes, until nothing does."""
    die_with(crew)
    os.setpgid(0, 0)  # a group of its own, with all that it starts
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    language = LANGUAGES[name]
    mutants = {mutant.id: mutant for mutant in language.chosen()}
    with language.opened() as hunt:
        hunt.learn(mutants.values(), entries)
        while True:
            try:
                ids, news = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            hunt.learn((mutants[id_] for id_ in news), news)
            batch = [mutants[id_] for id_ in ids]
            hunt.prepare(batch)
            for mutant in batch:
                entry = hunt(mutant)
                pipe.send((mutant.id, entry, _memory()))


def _memory() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def _stoppable() -> Iterator[None]:
    """While it is open, SIGINT and SIGTERM raise Stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
