"""Telling: a process that compiles in itself says so by its name, and the deadline of its launch
does not run meanwhile.

NVRTC compiles in the process that asks, where no compiler's process shows it, and the others that
want the same kernel wait for a lock.  A CuTe kernel takes a minute on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "verify-builds"
"""The name (/proc/PID/task/TID/comm) of a thread while it compiles; at most 15 bytes."""

_PR_SET_NAME, _PR_GET_NAME = 15, 16  # prctl.h
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tell that this thread compiles meanwhile, or waits for the process that does."""
    # prctl and not /proc, which a confined process cannot write.
    name = ctypes.create_string_buffer(16)
    _LIBC.prctl(_PR_GET_NAME, name, 0, 0, 0)
    _LIBC.prctl(_PR_SET_NAME, NAME.encode("ascii"), 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_NAME, name, 0, 0, 0)


def told_by(pid: int) -> bool:
    """Whether a thread of that process tells that it compiles; False for one that has ended."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/task/{task}/comm").read_bytes().strip() == NAME.encode():
                    return True
    return False
