"""The course of a run: what runs now and since when, how long each stage took, and its early end.

A run ends early at SIGINT, at SIGTERM or when its time is over.  Then every process that it started
is killed, nothing else begins, and what was not tried is *not run*, which is never clean.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verify.cell.descendants import children, descendants
from verify.machine.cores import cores

MEMORY = 4 << 30  # bytes of the machine's memory for one process under a tool: torch and the tool
DEVICE_MEMORY = 2 << 30  # bytes on the device: its context, the tool's own, the buffers
EVERY = 20.0  # seconds between two lines of progress
_TICK = 0.5  # seconds until an early end is seen
_SHOWN = 4  # processes in a line of progress


@dataclass
class Stage:
    """Processes of one kind.  begun, ended: in seconds since the run began.  busy: the sum of their
    seconds."""

    begun: float
    ended: float
    processes: int = 0
    busy: float = 0.0


@dataclass
class Course:
    """The course of a run.

    limit: seconds that it may take.  under_way: (what, since when) of each process.  stages: by
    name, those that have ended.
    """

    limit: float = math.inf
    begun: float = field(default_factory=time.monotonic)
    stages: dict[str, Stage] = field(default_factory=dict)
    under_way: dict[int, tuple[str, float]] = field(default_factory=dict)
    _reason: str = ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def over(self) -> str:
        """Why nothing else begins; "" while the run goes on."""
        if not self._reason and time.monotonic() - self.begun > self.limit:
            self._reason = f"the time of {self.limit:g} s was over"
        return self._reason

    def stop(self, reason: str) -> None:
        """End the run early."""
        self._reason = self._reason or reason

    @contextlib.contextmanager
    def process(self, stage: str, what: str) -> Iterator[None]:
        """One process, while it runs."""
        begun = time.monotonic()
        with self._lock:
            number = next(self._numbers)
            self.under_way[number] = what, begun
        try:
            yield
        finally:
            with self._lock:
                self.under_way.pop(number)
            self.took(stage, time.monotonic() - begun)

    def took(self, stage: str, seconds: float) -> None:
        """Count a process of a stage that ends now and took that long."""
        ended = time.monotonic() - self.begun
        with self._lock:
            known = self.stages.setdefault(stage, Stage(ended - seconds, ended))
            known.begun = min(known.begun, ended - seconds)
            known.ended = max(known.ended, ended)
            known.processes += 1
            known.busy += seconds

    def line(self) -> str:
        """What runs now, those first that have run longest."""
        now = time.monotonic()
        with self._lock:
            running = sorted(self.under_way.values(), key=lambda each: each[1])
            ended = sum(s.processes for name, s in self.stages.items() if name != "builds")
        named = ", ".join(f"{what} {now - since:.0f} s" for what, since in running[:_SHOWN])
        more = f" and {len(running) - _SHOWN} more" if len(running) > _SHOWN else ""
        return f"{now - self.begun:.0f} s: {ended} processes ended; now {named or 'none'}{more}"

    @contextlib.contextmanager
    def watched(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Tell what runs now every EVERY seconds; after an early end, kill what the run has
        started."""
        before = set(children(os.getpid()))
        left = threading.Event()

        def watch() -> None:
            told = time.monotonic()
            while not left.wait(_TICK):
                if self.over():
                    _kill(set(children(os.getpid())) - before)
                if time.monotonic() - told >= EVERY:
                    told = time.monotonic()
                    tell(self.line())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            with self._signals():
                yield
        finally:
            left.set()
            watcher.join()
            if self.over():
                _kill(set(children(os.getpid())) - before)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run early; the second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def end(number: int, frame: object) -> None:
            self.stop(f"ended by {signal.Signals(number).name}")
            restore()

        for number in before:
            signal.signal(number, end)
        try:
            yield
        finally:
            restore()


def worker_count(workers: str) -> int:
    """The number of parallel processes.  "auto" is one for each core, and no more than fit into the
    memory of the machine (MEMORY each) and of the device (DEVICE_MEMORY each)."""
    if workers != "auto":
        return max(1, int(workers))
    rooms = [(_memory(), MEMORY), (_device_memory(), DEVICE_MEMORY)]
    return max(1, min([cores(), *(has // each for has, each in rooms if has)]))


def _memory() -> int:
    """Bytes of memory that this process may use; a container's limit counts."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return most


def _device_memory() -> int:
    """Bytes that are free on the GPU with the least of them; 0 if that is not known."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(int(line) << 20 for line in said.stdout.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _kill(pids: set[int]) -> None:
    every = [below for pid in pids for below in (*descendants(pid), pid)]
    for pid in every:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
