"""History: the cases that a kernel process has run so far, for a failure that can need earlier
calls.

A kernel that damages its process can fail, or make another variant of its file fail, much later. So
a finding holds the cases before it in the same process.  A launch is repeated in a fresh process if
it ended a process that other cases had used, or if the judge's code raised in it.  A hang is always
repeated: on a busy machine a correct launch can miss a deadline too.  A launch without enough
memory is repeated while no other worker uses the GPU; what then runs out is the kernel's fault only
if it had as much as any kernel may take.  A launch whose process the GPU does not take is repeated
in the same way, and is never the kernel's fault.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from verify.cell.process import CROWDED, Cell, InfrastructureError, Reply, memory_limit
from verify.machine import turns

MOST = 32  # cases that are remembered; all are counted
_FRESH = 2  # fresh processes to try if the judge's own code fails, or memory runs out
_BESIDE = 3  # times to ask a shared GPU again for memory, before it is asked for alone
_PAUSE = 3.0  # seconds for other processes to free memory
_SHARED = ("raised", "crash", *CROWDED)  # what earlier calls in the same process can cause


@dataclass(frozen=True)
class Before:
    """The other cases that a process had run before a launch: the last `MOST` ids in order, their
    total count, and their variants."""

    cases: tuple[str, ...] = ()
    count: int = 0
    variants: frozenset[str] = frozenset()

    @property
    def told(self) -> str:
        """The history in words, for messages."""
        if not self.count:
            return "no other case had run before it in that process"
        kept = f", the last {len(self.cases)} on record" if self.count > len(self.cases) else ""
        cases = f"{self.count} case{'s' * (self.count > 1)} had run before it in that process{kept}"
        return f"{cases}: of {', '.join(sorted(self.variants))}"


@dataclass
class History:
    """The cases that the present kernel process of one cell has run.

    process: its number (`Cell.process_number`).  launches: the launches of all its cases.
    """

    process: int = 0
    launches: int = 0
    count: int = 0
    cases: deque[str] = field(default_factory=lambda: deque(maxlen=MOST))
    variants: set[str] = field(default_factory=set)

    def launched(self, process: int, case: str) -> tuple[Before, bool]:
        """Note a launch of that case in the process of that number.

        Returns the cases before it, and whether it was the first launch of the process.
        """
        if process != self.process:
            self.process, self.launches, self.count = process, 0, 0
            self.cases.clear()
            self.variants.clear()
        self.launches += 1
        again = bool(self.cases) and self.cases[-1] == case
        others = tuple(self.cases)[:-1] if again else tuple(self.cases)
        before = Before(others, self.count - again, frozenset(self.variants))
        if not again:
            self.cases.append(case)
            self.count += 1
        self.variants.add(case.rsplit(":", 3)[0])
        return before, self.launches == 1


@dataclass(frozen=True)
class Aftermath:
    """A launch that ended badly in a process that other cases had used, and well in a fresh one.

    first: the first process was fresh too.
    """

    reply: Reply
    before: Before
    first: bool = False


@dataclass
class Hearing:
    """One case in its cell's history.  before: the cases that had run in its process before its
    first launch."""

    case: str = ""
    history: History = field(default_factory=History)
    before: Before = field(default_factory=Before)
    aftermaths: list[Aftermath] = field(default_factory=list)
    _begun: bool = False

    def ask(self, cell: Cell, ask: Callable[[], Reply]) -> Reply:
        """Launch with `ask`, and again in a fresh process if the first reply can have another cause
        than this kernel; returns the reply that counts.

        Raises InfrastructureError if the judge's own code fails in fresh processes too, or if other
        processes leave a GPU too little memory.
        """
        on_gpu = cell.environment.device == "cuda"
        with _turn(cell):
            reply = ask()
        before, first = self.launched(cell)
        used = reply.status in _SHARED and not first
        if not (used or hangs(reply) or reply.crowded or judges(reply)):
            return reply
        found = self._beside(cell, ask) if on_gpu and reply.crowded else reply
        if found is reply or found.crowded or judges(found):
            with _whole_gpu() if on_gpu and found.crowded else contextlib.nullcontext():
                found = self._alone(cell, ask)
        if on_gpu and found.crowded and found.data.get("on_device"):
            _had_its_share(found, self.case.rsplit(":", 3)[0])
        if found.status in ("ok", "unsupported"):
            self.aftermaths.append(Aftermath(reply, before, first))
        else:
            self.before = Before()  # it fails alone
        return found

    def launched(self, cell: Cell) -> tuple[Before, bool]:
        """Note a launch in the cell's present process; see `History.launched`."""
        before, first = self.history.launched(cell.process_number, self.case)
        if not self._begun:
            self._begun, self.before = True, before
        return before, first

    def begin_again(self) -> None:
        """Take the next launch for the first one: those before it count for nothing."""
        self._begun = False

    def _beside(self, cell: Cell, ask: Callable[[], Reply]) -> Reply:
        """Launch again in fresh processes beside the other workers, which may have freed memory.

        To have the GPU alone, this worker would wait for the longest launch and reference of the
        others, and they for it: minutes, where many share a GPU.
        """
        for number in range(1, _BESIDE + 1):
            cell.restart()
            time.sleep(number * _PAUSE)
            with _turn(cell):
                reply = ask()
            self.history.launched(cell.process_number, self.case)
            if not reply.crowded:
                break
        return reply

    def _alone(self, cell: Cell, ask: Callable[[], Reply]) -> Reply:
        pause = 0.0
        for _ in range(_FRESH):
            cell.restart()
            time.sleep(pause)
            reply = ask()
            pause = _PAUSE if reply.crowded else 0.0
            self.history.launched(cell.process_number, self.case)
            if not (judges(reply) or reply.crowded):
                return reply
        if reply.crowded:
            return reply
        variant = self.case.rsplit(":", 3)[0]
        trace = str(reply.data.get("traceback", ""))
        raise InfrastructureError(
            f"{variant}: the judge's own code raised in {_FRESH} fresh processes: {reply.message}\n"
            f"case {self.case}\n{trace}".strip()
        )


def ask_several(
    hearings: Sequence[Hearing], cell: Cell, ask: Callable[[], Reply]
) -> tuple[Reply, Aftermath]:
    """Ask for launches of several cases at once; returns the reply, and the aftermath that it is if
    it is bad and the launches then succeed one by one."""
    with _turn(cell):
        reply = ask()
    noted = [hearing.launched(cell) for hearing in hearings]
    return reply, Aftermath(reply, noted[-1][0], noted[0][1])


def _turn(cell: Cell) -> contextlib.AbstractContextManager[None]:
    """A turn of a launch beside those of other workers, on a GPU."""
    on_gpu = cell.environment.device == "cuda"
    return turns.GPU.launching() if on_gpu else contextlib.nullcontext()


@contextlib.contextmanager
def _whole_gpu() -> Iterator[None]:
    """No other worker uses the GPU, and this process keeps no memory for later."""
    with turns.GPU.alone():
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        yield


def _had_its_share(reply: Reply, variant: str) -> None:
    """Raise InfrastructureError if the device lets no further process use it, or if memory ran out
    where other processes had left less of it than a kernel may take: `memory_limit`, or half."""
    if reply.status == "device busy":
        raise InfrastructureError(
            f"{variant}: the GPU takes no further process, of which NVIDIA's MPS can have few; use"
            f" fewer workers (-n), or end the other programs, and continue the run: {reply.message}"
        )
    room, total = (reply.data.get(name) for name in ("room", "total"))
    left = "nothing"  # not even what it takes to ask
    if type(room) is int and type(total) is int:
        if room >= min(memory_limit(), total / 2):
            return
        left = f"{room / 2**30:.1f} of {total / 2**30:.1f} GiB"
    raise InfrastructureError(
        f"{variant}: memory ran out on the GPU, of which other processes left {left}; use fewer"
        f" workers (-n), or end the other programs, and continue the run: {reply.message}"
    )


def hangs(reply: Reply) -> bool:
    """Whether the deadline passed, which a busy machine can cause."""
    return reply.status == "hang"


def judges(reply: Reply) -> bool:
    """Whether the reply is an exception that the judge's code in the cell raised, and not the
    kernel."""
    return reply.status == "raised" and bool(reply.data.get("judge"))
