"""The judge's side of a cell: start it, ask it, time it, and say what became of it.

A `Zygote` is one environment's process (plain, or with Triton's interpreter); a `Cell` has at most one life forked from it.
Whatever a kernel does to its life - an exception, a crash, a hang, a poisoned CUDA context - becomes a `Reply`; the next
request finds a fresh life.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from verify import bundle
from verify.cell.wire import Closed, receive, send
from verify.memory import Arena

ROOT = bundle.ROOT
_START_TIMEOUT = 180.0  # seconds for a zygote to import torch on a busy machine


class InfrastructureError(RuntimeError):
    """The cell itself could not be had; no verdict on any kernel."""


@dataclass(frozen=True)
class Environment:
    """What a cell's process sees: a name for reports, environment variables, and whether kernels run on "cuda" or "cpu"."""

    name: str
    device: str
    variables: tuple[tuple[str, str], ...] = ()
    patience: float = 60.0  # seconds for one request: any run may compile a build


# One compile thread per cell: there are as many cells as cores.
PLAIN_CUDA = Environment("cuda", "cuda", (("TORCHINDUCTOR_COMPILE_THREADS", "1"),), patience=120.0)
# Compiling needs no device; Triton must not interpret.
COMPILER = Environment("compiler", "cpu", (("TRITON_INTERPRET", "0"), ("CUDA_VISIBLE_DEVICES", "")), patience=300.0)
# Without a GPU Triton kernels run in its interpreter; the switch does nothing to kernels that are not Triton's.
PLAIN_CPU = Environment("cpu", "cpu", (("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", "")))


@dataclass(frozen=True)
class Reply:
    """What came of a request.  status: "ok", "unsupported", "breach", "raised", "out of memory", "crash" or "hang"."""

    status: str
    message: str = ""
    argument: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Zygote:
    """The process of one environment, with torch imported, from which lives are forked."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()  # one caller at a time on the control socket

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """A new life: its socket and process id.  `log` is the descriptor that gets its output."""
        with self._lock:
            try:
                return self._fork(log)
            except (Closed, TimeoutError):  # a kernel may have killed it, and its end need not have been seen yet
                self.close()
            try:
                return self._fork(log)
            except (Closed, TimeoutError) as error:
                raise InfrastructureError(f"the {self.environment.name} zygote is gone: {error}") from error

    def _fork(self, log: int) -> tuple[socket.socket, int]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._control is not None
        mine, theirs = socket.socketpair()
        try:
            send(self._control, {"op": "fork"}, [theirs.fileno(), log])
            return mine, int(receive(self._control)[0]["pid"])
        except (Closed, TimeoutError):
            mine.close()
            raise
        finally:
            theirs.close()

    def reap(self, pid: int) -> int | None:
        """Exit status of a life that has ended (negative: a signal), or None if the zygote cannot say."""
        if self._control is None:
            return None
        try:
            with self._lock:
                send(self._control, {"op": "reap", "pid": pid})
                return int(receive(self._control)[0]["exit"])
        except (Closed, TimeoutError):
            return None

    def close(self) -> None:
        """End the process; it kills what lives are left."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        mine, theirs = socket.socketpair()
        variables = os.environ | dict(self.environment.variables) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        variables = bundle.for_children(variables)
        command = [sys.executable, "-m", "verify.cell.child", str(theirs.fileno())]
        # Its own words matter only when it fails to start.
        with tempfile.TemporaryFile() as words:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL, stdout=words, stderr=words
            )
            theirs.close()
            mine.settimeout(_START_TIMEOUT)
            try:
                receive(mine)
            except (Closed, TimeoutError) as error:
                mine.close()
                words.seek(0)
                text = words.read()[-2000:].decode(errors="replace")
                raise InfrastructureError(f"the {self.environment.name} zygote did not start: {text}") from error
        self._control = mine


class Cell:
    """One life at a time, which loads kernel files and runs them in the judge's arena."""

    def __init__(self, zygote: Zygote) -> None:
        self.environment = zygote.environment
        self.lives = 0
        self._zygote = zygote
        self._life: socket.socket | None = None
        self._pid = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the cell
        self._loaded: set[str] = set()
        self._arena_generation = 0
        self._hung = False
        self._requests = 0

    # Requests.

    def load(self, path: str) -> Reply:
        """Load a kernel file; the reply's data["variants"] describes what it holds."""
        self._ensure_life()
        message = {"op": "load", "path": path, "package_root": str(ROOT)}
        reply = self._ask(message, self.environment.patience)
        if reply.ok:
            self._loaded.add(path)
        return reply

    def arch(self) -> str:
        """The architecture that this cell's kernels run on: "sm_90", "cpu"..."""
        self._ensure_life()
        reply = self._ask({"op": "device"}, self.environment.patience)
        if not reply.ok:
            raise InfrastructureError(f"the {self.environment.name} cell does not answer: {reply.message}")
        return str(reply.data["arch"])

    def workspace(self, path: str, request: dict[str, Any]) -> Reply:
        """Ask which scratch buffers the variant wants for these shapes."""
        return self._on_loaded(path, request | {"op": "workspace"}, self.environment.patience)

    def builds(self, path: str, variant: str, arch: str) -> Reply:
        """Names of what the variant compiles for that arch: data["builds"]."""
        return self._on_loaded(path, {"op": "builds", "variant": variant, "arch": arch}, self.environment.patience)

    def compile(self, path: str, variant: str, arch: str, build: str) -> Reply:
        """Compile one build, without a GPU: data["resources"] and data["seconds"]."""
        message = {"op": "compile", "variant": variant, "arch": arch, "build": build}
        return self._on_loaded(path, message, self.environment.patience)

    def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
        """Run one kernel over the arena as it is laid out; returns when the device is idle again."""
        patience = float(os.environ.get("VERIFY_DEADLINE", self.environment.patience))
        # A hang costs its whole deadline at every step of shrinking: once one was seen, patience is shorter.
        deadline = patience / 4 if self._hung else patience
        reply = self._on_loaded(path, request | {"op": "run", "device": self.environment.device}, deadline, arena)
        self._hung |= reply.status == "hang"
        return reply

    def close(self) -> None:
        """End the life."""
        self._end_life()
        self._log.close()

    def restart(self) -> None:
        """End the life, and give back what it holds; the next request finds a fresh one."""
        self._end_life()

    # Below: lives and their ends.

    def _on_loaded(self, path: str, message: dict[str, Any], deadline: float, arena: Arena | None = None) -> Reply:
        self._ensure_life()
        if path not in self._loaded:
            reply = self.load(path)
            if not reply.ok:
                return reply
        if arena is not None and self._arena_generation != arena.generation:
            reply = self._ask({"op": "arena", "capacity": arena.capacity}, self.environment.patience, [arena.fd])
            if not reply.ok:
                return reply
            self._arena_generation = arena.generation
        return self._ask(message, deadline)

    def _ask(self, message: dict[str, Any], deadline: float, fds: list[int] | None = None) -> Reply:
        assert self._life is not None
        begun = time.perf_counter()
        self._life.settimeout(deadline)
        self._requests += 1
        try:
            send(self._life, message | {"request": self._requests}, fds)
            data, _ = receive(self._life)
            if data.get("request") != self._requests:
                raise Closed("a reply to no request")
        except TimeoutError:
            self._end_life()
            return Reply("hang", f"no answer within {deadline:g} s; killed", seconds=time.perf_counter() - begun)
        except Closed as end:
            return Reply("crash", self._obituary(str(end)), seconds=time.perf_counter() - begun)
        seconds = time.perf_counter() - begun
        status = str(data.get("status", "raised"))
        reason = str(data.get("reason") or data.get("message") or "")
        reply = Reply(status, reason, str(data.get("argument", "")), seconds, data)
        if data.get("poisoned"):
            self._end_life()
        return reply

    def _ensure_life(self) -> None:
        # What can be read between two requests is the end of a life that died idle (with its zygote, say), or words that
        # nobody asked for; neither is an answer to the next request.
        if self._life is not None and select.select([self._life], [], [], 0)[0]:
            self._end_life()
        if self._life is not None:
            return
        self._log.seek(0)
        self._log.truncate()
        self._life, self._pid = self._zygote.fork(self._log.fileno())
        self._loaded.clear()
        self._arena_generation = 0
        self.lives += 1

    def _end_life(self) -> int | None:
        """Kill the life, if any, and return its exit status."""
        if self._life is None:
            return None
        self._life.close()
        self._life = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return self._zygote.reap(self._pid)

    def _obituary(self, garbage: str) -> str:
        """How the life ended, and its last words; `garbage`: what made its reply unreadable, if it sent one."""
        # Killing does not change how a process that is already dying ends; it does end one that only closed its socket.
        status = self._end_life()
        if garbage:
            how = f"sent {garbage}; killed"
        elif status is None:
            how = "the cell ended"
        elif status < 0:
            name = signal.Signals(-status).name
            how = f"killed by {name}" + (" (out of memory, or it closed its socket?)" if name == "SIGKILL" else "")
        else:
            how = f"exited with status {status}"
        with contextlib.suppress(OSError):
            self._log.seek(max(self._log.seek(0, os.SEEK_END) - 1500, 0))
            words = self._log.read().decode(errors="replace").strip()
            return f"{how}\n{words}" if words else how
        return how
