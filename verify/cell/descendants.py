"""Descendants: the processes that a kernel process started, which must not outlive it.

A process whose parent ends becomes a child of its nearest living ancestor that is a subreaper.  A
kernel process is one, so that the processes its kernels leave stay below it.  The fork server is
one too: when the kernel process ends, it inherits all of these, and can kill them.  That includes a
process that forked twice and began its own session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from verify.cuda.telling import told_by

_PR_SET_CHILD_SUBREAPER = 36
# Rounds, and seconds between them, of killing: orphans can start processes while others are killed.
_ROUNDS, _PAUSE = 200, 0.01
# Programs that compile kernels, by their names in /proc/<pid>/comm.
_COMPILERS = frozenset(
    {
        *("as", "c++", "cc", "cc1", "cc1plus", "clang", "clang++", "collect2", "g++", "gcc"),
        *("ld", "ld.bfd", "ld.gold", "ld.lld", "lld", "mold", "cmake", "make", "ninja"),
        *("cicc", "cudafe++", "fatbinary", "nvcc", "nvlink", "ptxas", "tileiras"),
    }
)


def become_subreaper() -> None:
    """On Linux, make this process inherit the orphans among its descendants."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Process ids of the children, zombies included; empty for a process that has ended."""
    pids: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return pids
    for task in tasks:
        try:
            pids += map(
                int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
            )
        except FileNotFoundError:  # the thread has ended, or the system was built without this file
            if not Path("/proc/self/task").joinpath(str(os.getpid()), "children").exists():
                return _children_by_parent(pid)
        except OSError:
            continue
    return pids


def _children_by_parent(pid: int) -> list[int]:
    pids = []
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
                    pids.append(int(name))
    return pids


def descendants(pid: int) -> list[int]:
    """Process ids of the children, their children and so on."""
    below: list[int] = []
    pending = [pid]
    while pending:
        new = [child for child in children(pending.pop()) if child not in below]
        below += new
        pending += new
    return below


def compiling(pid: int) -> bool:
    """Whether a compiler runs in that process (`verify.cuda.telling`) or somewhere below it."""
    below = descendants(pid)
    return any(map(told_by, (pid, *below))) or any(map(_compiles, below))


def _compiles(pid: int) -> bool:
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
        return name.strip() in _COMPILERS
    return False


def held_below(pid: int) -> int:
    """Resident bytes of that process's descendants, without compilers: their own, and their parts
    of those that they share with each other or with their parent."""
    return sum(_own_part(child) for child in descendants(pid) if not _compiles(child))


def _own_part(pid: int) -> int:
    """Of a page that a fork shares with its parent each has its part.  A process can hide these
    numbers; its resident ones it cannot."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return resident(pid)
    parts = [line.split() for line in lines if line.startswith("Pss_Anon:")]
    return int(parts[0][1]) << 10 if parts else resident(pid)


def kill_orphans(spared: Collection[int]) -> None:
    """Kill every child of this process that is not in `spared`, with its descendants, and wait for
    it."""
    for _ in range(_ROUNDS):
        orphans = [pid for pid in children(os.getpid()) if pid not in spared]
        if not orphans:
            return
        for pid in orphans:
            for each in (pid, *descendants(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE)


def resident(pid: int) -> int:
    """Resident bytes that a process shares with no other; 0 if they cannot be read."""
    try:
        _, pages, shared_pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[:3]
    except (OSError, ValueError):
        return 0
    return max(int(pages) - int(shared_pages), 0) * os.sysconf("SC_PAGE_SIZE")
