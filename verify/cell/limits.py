"""Limits of a kernel process that the judge watches during a request: time, memory and output."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import IO

from verify.cell.descendants import held_below, resident
from verify.machine import settings, turns

_BUILD_DEADLINE = 900.0  # seconds to load a kernel file, and to wait for a compiler it has started
_MEMORY_LIMIT = 16 << 30  # bytes for one kernel process, on a machine with twice as much
_BLOCK = 512  # bytes of st_blocks' unit
_END = 1 << 16  # bytes of the output that are never dropped


class TooMuchMemory(Exception):  # noqa: N818 - the kernel process's fault, not the judge's
    """A kernel process, or what it has started, takes more memory than it may."""


def build_deadline() -> float:
    """Seconds for loading or compiling a kernel file: VERIFY_BUILD_DEADLINE, or 900."""
    return settings.seconds("VERIFY_BUILD_DEADLINE", _BUILD_DEADLINE)


def memory_limit() -> float:
    """Bytes that a kernel process may have unshared, with the processes that it has started:
    VERIFY_LIFE_MEMORY (in GiB) if it is set, else 16 GiB or half of the machine's memory, the
    smaller one."""
    setting = os.environ.get("VERIFY_LIFE_MEMORY")
    if setting is not None:
        return float(setting) * (1 << 30)
    return min(_MEMORY_LIMIT, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2)


def held(pid: int) -> int:
    """Unshared resident bytes of a kernel process and of the processes that it has started;
    compilers have what they need."""
    return resident(pid) + held_below(pid)


class Output:
    """The file that a kernel process's standard output and error go to.

    most: bytes of it that are kept on the disk.  A kernel that prints in every launch would fill
    the disk of a long campaign; only the end is ever shown.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._dropped = b""  # the end of what was dropped
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the cell

    def begin(self) -> None:
        """Empty it for a new process."""
        self._dropped = b""
        self.file.seek(0)
        self.file.truncate()

    def shorten(self) -> None:
        """Drop what is there if it is too much; its end is remembered."""
        if os.fstat(self.file.fileno()).st_blocks * _BLOCK > self._most:
            self._dropped = self._last(_END)
            # The process writes on at its own place: what is in front of it takes no room.
            os.ftruncate(self.file.fileno(), 0)

    def end(self, most: int) -> str:
        """Its last `most` bytes, as they came: not yet `visible`."""
        return self._last(most).decode(errors="replace")

    def _last(self, most: int) -> bytes:
        self.file.seek(max(self.file.seek(0, os.SEEK_END) - most, 0))
        written = self.file.read().lstrip(b"\0")  # what was dropped reads as zeros
        return (self._dropped + written)[-most:]


class Watch:
    """Watches a kernel process during a request: its memory, its output, and whether a compiler
    runs, whose time does not count."""

    def __init__(
        self, pid: int, building: float, compiles: Callable[[], bool], output: Output
    ) -> None:
        self._pid = pid
        self._building = building
        self._compiles = compiles
        self._output = output
        self._most = held(pid) + memory_limit()  # memory from earlier requests does not count

    def counts(self, seconds: float) -> float:
        """How many of the passed `seconds` count against the deadline.  Raises TooMuchMemory."""
        turns.GPU.make_way()
        if held(self._pid) > self._most:
            raise TooMuchMemory
        self._output.shorten()
        if self._building <= 0 or not self._compiles():
            return seconds
        self._building -= seconds
        return 0.0
