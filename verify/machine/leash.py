"""Leash: a process that ends when its parent does, whatever ends the parent (kill -9 too).  Linux
alone can do that."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "VERIFY_PARENT"  # the process that a campaign must not outlive, by its id
_PR_SET_PDEATHSIG = 1  # prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, of that process id, ends; at once, if it
    has ended already."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
