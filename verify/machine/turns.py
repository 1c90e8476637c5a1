"""Turns on a GPU that several workers share: many use it side by side, or one has it alone.

Launches and references take part side by side.  A launch for which memory ran out is repeated
alone: then no other worker takes memory at the same time.

A GPU runs one process at a time, in slices.  Where many launch at once, each of the short pieces of
work of a launch waits for a slice.  So `launching` lets few processes in (VERIFY_LAUNCHERS); the
others wait without using a core.  It is a courtesy, not a rule: a launch that takes long, because
it compiles or hangs, makes way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from verify.machine import device
from verify.machine.settings import LAUNCHERS


class Turns:
    """The turns of one GPU, by locks on two files, which end with the process that holds them.

    A process that waits to be alone holds the door, so that no newcomer overtakes it.  Within one
    process turns nest, except that `alone` cannot begin within another turn.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._seat = -1  # the descriptor of the lock of this process's place among those who launch

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Use the GPU side by side with others."""
        if self._inside:
            yield
            return
        with contextlib.ExitStack() as room:
            with self._locked("door", fcntl.LOCK_EX):
                room.enter_context(self._locked("room", fcntl.LOCK_SH))
            with self._counted():
                yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while no other process that takes turns does.  Raises RuntimeError within
        `shared`, where it would wait for itself."""
        if self._inside:
            raise RuntimeError("a turn alone cannot begin within another turn")
        with (
            self._locked("door", fcntl.LOCK_EX),
            self._locked("room", fcntl.LOCK_EX),
            self._counted(),
        ):
            yield

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Use the GPU side by side with others, of which few launch at the same time."""
        with self.shared():
            most = int(os.environ.get(LAUNCHERS, "0"))
            if not most or self._seat >= 0:
                yield
                return
            worker = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", ""))
            number = int(worker) if worker else os.getpid()
            self._seat = self._take(f"seat{number % most}", fcntl.LOCK_EX)
            try:
                yield
            finally:
                self.make_way()

    def make_way(self) -> None:
        """Let another process launch, although a launch of this one is under way."""
        if self._seat >= 0:
            os.close(self._seat)
            self._seat = -1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def _locked(self, what: str, kind: int) -> Iterator[None]:
        handle = self._take(what, kind)
        try:
            yield
        finally:
            os.close(handle)

    def _take(self, what: str, kind: int) -> int:
        """The descriptor of a lock that this process has from now on, until that is closed."""
        # Read late: a worker is forked first, and learns its GPU then.
        gpu = _named(os.environ.get("CUDA_VISIBLE_DEVICES"))
        name = f"verify-{os.getuid()}-{gpu[:80]}.{what}"
        path = Path(tempfile.gettempdir(), name)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, kind)
        except BaseException:
            os.close(handle)
            raise
        return handle


@cache
def _named(mask: str | None) -> str:
    """The first GPU that this mask leaves visible; the same name, whether a mask holds its number,
    its UUID or the begin of it, or there is no mask."""
    first = device.own() or (mask or "all").partition(",")[0]
    return re.sub(r"[^0-9A-Za-z-]+", "_", first)


GPU = Turns()  # of the GPU that this process uses
