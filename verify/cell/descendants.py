"""Descendants: the processes that a life started, which must not outlive it.

A process whose parent ends is inherited by its nearest living ancestor that asked to be a
subreaper.  A life asks, so that what its kernels leave behind stays below it; the fork server asks,
so that it inherits all of that when the life ends, a process that forked twice and began a session
of its own included, and can kill it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# of looking for processes that are being started while others are killed
_ROUNDS, _PAUSE = 200, 0.01
# What compiles kernels as a process of its own, by the name that the kernel of the system knows it
# by.
_COMPILERS = frozenset(
    {
        *("as", "c++", "cc", "cc1", "cc1plus", "clang", "clang++", "collect2", "g++", "gcc"),
        *("ld", "ld.bfd", "ld.gold", "ld.lld", "lld", "mold", "cmake", "make", "ninja"),
        *("cicc", "cudafe++", "fatbinary", "nvcc", "nvlink", "ptxas", "tileiras"),
    }
)


def become_subreaper() -> None:
    """Inherit the orphans among this process's descendants, on Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Process ids of the children, those that ended and were not waited for included; none of a
    process that is gone."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += map(
                int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
            )
        except FileNotFoundError:  # the thread has ended, or the system was built without this file
            if not Path("/proc/self/task").joinpath(str(os.getpid()), "children").exists():
                return _children_by_parent(pid)
        except OSError:
            continue
    return found


def _children_by_parent(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (
                    Path(f"/proc/{name}/stat")
                    .read_text(encoding="utf-8", errors="replace")
                    .rpartition(")")[2]
                    .split()
                )
                if int(fields[1]) == pid:
                    found.append(int(name))
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of the children, their children and so on."""
    found: list[int] = []
    left = [pid]
    while left:
        young = [child for child in children(left.pop()) if child not in found]
        found += young
        left += young
    return found


def compiling(pid: int) -> bool:
    """Whether a compiler runs somewhere below that process."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if (
                Path(f"/proc/{child}/comm").read_text(encoding="utf-8", errors="replace").strip()
                in _COMPILERS
            ):
                return True
    return False


def bury(spared: Collection[int]) -> None:
    """Kill what this process inherited, and wait for it: every child that is not `spared`, with all
    below it."""
    for _ in range(_ROUNDS):
        strangers = [pid for pid in children(os.getpid()) if pid not in spared]
        if not strangers:
            return
        for pid in strangers:
            for each in (pid, *descendants(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
        for pid in strangers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE)


def resident(pid: int) -> int:
    """Bytes of memory that a process has to itself; 0 where that cannot be read."""
    try:
        _, whole, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[:3]
    except (OSError, ValueError):
        return 0
    return max(int(whole) - int(shared), 0) * os.sysconf("SC_PAGE_SIZE")
