"""Leash: makes a process end when its parent ends, even by kill -9.  Only Linux supports this."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "VERIFY_PARENT"  # the id of the process that a campaign must not outlive
_PR_SET_PDEATHSIG = 1  # prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with(parent: int) -> None:
    """Make the system kill this process when its parent ends; end at once if it has ended already.

    parent: the parent's process id.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
