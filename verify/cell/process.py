"""The judge's side of a cell: start it, ask it, time it, and say what became of it.

A `ForkServer` is one environment's process (plain, or with Triton's interpreter); a `Cell` has at
most one life forked from it. Whatever a kernel does to its life - an exception, a crash, a hang, a
poisoned CUDA context - becomes a `Reply`; the next request finds a fresh life.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from verify.cell import extension_locks
from verify.cell.arena import Arena
from verify.cell.descendants import compiling, resident
from verify.cell.fork_server import (
    COMPILER,
    PLAIN_CPU,
    PLAIN_CUDA,
    ROOT,
    Environment,
    ForkServer,
    InfrastructureError,
)
from verify.cell.protocol import Closed, Countdown, receive, send
from verify.cell.untrusted_text import visible, visible_data
from verify.machine import settings

__all__ = [
    "COMPILER",
    "PLAIN_CPU",
    "PLAIN_CUDA",
    "ROOT",
    "Cell",
    "Environment",
    "ForkServer",
    "InfrastructureError",
    "Reply",
]

# seconds to load a kernel file, and to wait for a compiler that it has started
_BUILD_DEADLINE = 900.0
_MOST_BYTES = 1 << 50  # that a device has
_MOST_MEMORY = 16 << 30  # bytes that a life may have to itself, on a machine with twice as much


@dataclass(frozen=True)
class Reply:
    """What came of a request.  status: "ok", "unsupported", "breach", "raised", "out of memory",
    "crash" or "hang".

    grown: bytes by which the life's own memory grew during the request; kept, taken: of a run on a
    device, see `DeviceMemory.watch`.  All texts are fit to be shown (`words.visible`).
    """

    status: str
    message: str = ""
    argument: str = ""
    seconds: float = 0.0
    grown: int = 0
    kept: int = 0
    taken: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class _Overgrown(Exception):  # noqa: N818 - an end of the life, not an error of ours
    """A life takes more memory than it may."""


class _Watch:
    """Looks at a life while it works: what it takes, and whether it waits for a compiler, which is
    no time of its own."""

    def __init__(self, pid: int, building: float) -> None:
        self._pid = pid
        self._building = building
        self._most = resident(pid) + most_memory()  # what it had before is not this request's

    def counts(self, seconds: float) -> float:
        """How many of the `seconds` that have passed count against the deadline.  Raises
        _Overgrown."""
        if resident(self._pid) > self._most:
            raise _Overgrown
        if self._building <= 0 or not compiling(self._pid):
            return seconds
        self._building -= seconds
        return 0.0


def build_deadline() -> float:
    """Seconds that a kernel file may take to load or to compile: VERIFY_BUILD_DEADLINE, or 900."""
    return settings.seconds("VERIFY_BUILD_DEADLINE", _BUILD_DEADLINE)


def most_memory() -> float:
    """Bytes that a life may have to itself: VERIFY_LIFE_MEMORY (GiB), or 16 GiB, but half of the
    machine's at most."""
    chosen = os.environ.get("VERIFY_LIFE_MEMORY")
    if chosen is not None:
        return float(chosen) * (1 << 30)
    return min(_MOST_MEMORY, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2)


def _bytes(said: object) -> int:
    """A number of bytes, as a life says it; 0 for what is none."""
    return said if type(said) is int and 0 <= said < _MOST_BYTES else 0


class Cell:
    """One life at a time, which loads kernel files and runs them in the judge's arena."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.environment = fork_server.environment
        self.lives = 0
        self._fork_server = fork_server
        self._life: socket.socket | None = None
        self._pid = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the cell
        self._loaded: set[str] = set()
        self._arena_generation = 0
        self._hangs: Counter[str] = Counter()  # in a row, by variant
        self._requests = 0

    # Requests.

    def load(self, path: str) -> Reply:
        """Load a kernel file; the reply's data["variants"] describes what it holds."""
        self._ensure_life()
        # one that an earlier run's kernel left behind would hold this one up for ever
        extension_locks.clear()
        message = {"op": "load", "path": path, "package_root": str(ROOT)}
        reply = self._ask(message, build_deadline(), building=0.0)
        if reply.status == "hang":
            reply = replace(
                reply,
                message=(
                    f"loading it: {reply.message} (VERIFY_BUILD_DEADLINE sets how long it may take)"
                ),
            )
        if reply.ok:
            self._loaded.add(path)
        return reply

    def arch(self) -> str:
        """The architecture that this cell's kernels run on: "sm_90", "cpu"..."""
        self._ensure_life()
        reply = self._ask({"op": "device"}, self.environment.patience)
        if not reply.ok:
            raise InfrastructureError(
                f"the {self.environment.name} cell does not answer: {reply.message}"
            )
        return str(reply.data["arch"])

    def workspace(self, path: str, request: dict[str, Any]) -> Reply:
        """Ask which scratch buffers the variant wants for these shapes."""
        return self._on_loaded(path, request | {"op": "workspace"}, self.environment.patience)

    def builds(self, path: str, variant: str, arch: str) -> Reply:
        """Names of what the variant compiles for that arch: data["builds"]."""
        return self._on_loaded(
            path, {"op": "builds", "variant": variant, "arch": arch}, self.environment.patience
        )

    def compile(self, path: str, variant: str, arch: str, build: str) -> Reply:
        """Compile one build, without a GPU: data["resources"] and data["seconds"]."""
        message = {"op": "compile", "variant": variant, "arch": arch, "build": build}
        return self._on_loaded(path, message, self.environment.patience)

    def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
        """Run one kernel over the arena as it is laid out; returns when the device is idle
        again."""
        patience = float(os.environ.get("VERIFY_DEADLINE", self.environment.patience))
        # A hang costs a deadline at every step of shrinking: once one is sure, patience is shorter.
        variant = str(request["variant"])
        sure = self._hangs[variant] > 1
        deadline = patience / 4 if sure else patience
        reply = self._on_loaded(
            path, request | {"op": "run", "device": self.environment.device}, deadline, arena
        )
        if not sure:
            self._hangs[variant] = self._hangs[variant] + 1 if reply.status == "hang" else 0
        return reply

    def close(self) -> None:
        """End the life."""
        self._end_life()
        self._log.close()

    def restart(self) -> None:
        """End the life, and give back what it holds; the next request finds a fresh one."""
        self._end_life()

    # Below: lives and their ends.

    def _on_loaded(
        self, path: str, message: dict[str, Any], deadline: float, arena: Arena | None = None
    ) -> Reply:
        self._ensure_life()
        if path not in self._loaded:
            reply = self.load(path)
            if not reply.ok:
                return reply
        if arena is not None and self._arena_generation != arena.generation:
            reply = self._ask(
                {"op": "arena", "capacity": arena.capacity}, self.environment.patience, [arena.fd]
            )
            if not reply.ok:
                return reply
            self._arena_generation = arena.generation
        return self._ask(message, deadline)

    def _ask(
        self,
        message: dict[str, Any],
        deadline: float,
        fds: list[int] | None = None,
        building: float | None = None,
    ) -> Reply:
        """building: seconds for which a compiler may stop the clock, instead of
        `build_deadline`."""
        assert self._life is not None
        watch = _Watch(self._pid, build_deadline() if building is None else building)
        begun = time.perf_counter()
        before = resident(self._pid)
        self._life.settimeout(deadline)
        self._requests += 1
        try:
            send(self._life, message | {"request": self._requests}, fds)
            data, _ = receive(self._life, countdown=Countdown(deadline, watch.counts))
            if data.get("request") != self._requests:
                raise Closed("a reply to no request")
        except TimeoutError:
            self._end_life()
            return Reply(
                "hang",
                f"no answer within {deadline:g} s; killed",
                seconds=time.perf_counter() - begun,
            )
        except _Overgrown:
            words = f"its process took {self._taken()}; killed"
            self._end_life()
            return Reply("out of memory", words, seconds=time.perf_counter() - begun)
        except Closed as end:
            return Reply(
                "crash", self._exit_description(str(end)), seconds=time.perf_counter() - begun
            )
        seconds = time.perf_counter() - begun
        # The one place where a kernel's words reach the judge.  Paths of sources are opened, and
        # never shown.
        sources = data.get("sources")
        data = visible_data(data)
        if sources is not None:
            data["sources"] = sources
        reason = str(data.get("reason") or data.get("message") or "")
        reply = Reply(
            status=str(data.get("status", "raised")),
            message=reason,
            argument=str(data.get("argument", "")),
            seconds=seconds,
            grown=max(resident(self._pid) - before, 0),
            kept=_bytes(data.get("kept")),
            taken=_bytes(data.get("taken")),
            data=data,
        )
        if resident(self._pid) > most_memory():
            reply = replace(
                reply,
                message=f"{reason}\nits process took {self._taken()}; a fresh one follows".strip(),
            )
            self._end_life()
        elif data.get("poisoned"):
            self._end_life()
        return reply

    def _taken(self) -> str:
        taken, most = resident(self._pid) / (1 << 30), most_memory() / (1 << 30)
        return (
            f"{taken:.1f} GiB of memory, more than the {most:.1f} GiB that it may have"
            " (VERIFY_LIFE_MEMORY, in GiB)"
        )

    def _ensure_life(self) -> None:
        # What can be read between two requests is the end of a life that died idle (with its fork
        # server, say), or words that nobody asked for; neither is an answer to the next request.
        if self._life is not None and select.select([self._life], [], [], 0)[0]:
            self._end_life()
        if self._life is not None:
            return
        self._log.seek(0)
        self._log.truncate()
        self._life, self._pid = self._fork_server.fork(self._log.fileno())
        self._loaded.clear()
        self._arena_generation = 0
        self.lives += 1

    def _end_life(self) -> int | None:
        """Kill the life, if any, and return its exit status."""
        if self._life is None:
            return None
        held = extension_locks.held_by(self._pid)
        self._life.close()
        self._life = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        status = self._fork_server.reap(self._pid)
        extension_locks.clear(held)
        return status

    def _exit_description(self, garbage: str) -> str:
        """How the life ended, and its last words; `garbage`: what made its reply unreadable, if it
        sent one."""
        # Killing does not change how a process that is already dying ends; it does end one that
        # only closed its socket.
        status = self._end_life()
        if garbage:
            how = f"sent {garbage}; killed"
        elif status is None:
            how = "the cell ended"
        elif status < 0:
            name = signal.Signals(-status).name
            how = f"killed by {name}" + (
                " (out of memory, or it closed its socket?)" if name == "SIGKILL" else ""
            )
        else:
            how = f"exited with status {status}"
        with contextlib.suppress(OSError):
            self._log.seek(max(self._log.seek(0, os.SEEK_END) - 1500, 0))
            words = visible(self._log.read().decode(errors="replace")).strip()
            return f"{how}\n{words}" if words else how
        return how
