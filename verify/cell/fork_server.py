"""The judge's side of a fork server: one environment's process, which forks kernel processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from verify import bundle
from verify.cell.confinement import Confinement, confinement, variables
from verify.cell.protocol import Closed, receive, send
from verify.cell.untrusted_text import visible
from verify.machine import other_triton, settings, starter
from verify.machine.compiling import COMPILES
from verify.machine.places import state_directory

ROOT = bundle.ROOT
CHILD = "verify.cell.child"
"""The module of a fork server; torch is the most of what it imports."""

_START_TIMEOUT = 180.0  # seconds for a fork server to import torch on a busy machine
_CONTROL_TIMEOUT = 20.0  # seconds for it to fork, or to wait for the end of a killed process
_END_TIMEOUT = 15.0  # seconds for it to end its kernel processes when the judge disconnects


class InfrastructureError(RuntimeError):
    """The cell, or the machine, does not work; this is no verdict on a kernel."""


@dataclass(frozen=True)
class Environment:
    """The environment of kernel processes: a name for reports, the device ("cuda" or "cpu"),
    environment variables, and what the fork server imports beside torch (`cell/preloading.py`)."""

    name: str
    device: str
    variables: tuple[tuple[str, str], ...] = ()
    patience: float = 60.0  # seconds for one request: any run can compile a build
    preloads: tuple[str, ...] = ()


# One compile thread per cell, since there are as many cells as cores.
PLAIN_CUDA = Environment("cuda", "cuda", (("TORCHINDUCTOR_COMPILE_THREADS", "1"),), patience=120.0)
# Compiling needs no device; Triton must not interpret.
COMPILER = Environment("compiler", "cpu", (COMPILES, ("CUDA_VISIBLE_DEVICES", "")), patience=300.0)
TRITON_COMPILER = replace(COMPILER, preloads=("triton-compiler",))
# Without a GPU, Triton kernels run in Triton's interpreter; other kernels ignore this variable.
PLAIN_CPU = Environment("cpu", "cpu", (("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", "")))


class ForkServer:
    """The process of one environment, with torch imported, which forks kernel processes."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._process: starter.Process | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()  # one caller at a time on the control socket
        self._number = 0  # of the last control message; late answers have another number
        self._scratch = ""  # the parent of the kernel processes' scratch directories
        self._confinement: Confinement | None = None

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """Start a kernel process; returns its socket and process id.

        log: the file descriptor for its output.  Raises InfrastructureError if it does not start.
        """
        with self._lock:
            try:
                peer, pid = self._fork(log)
            except (
                Closed,
                TimeoutError,
            ):  # a kernel can have killed the fork server just now
                self.close()
                try:
                    peer, pid = self._fork(log)
                except (Closed, TimeoutError) as error:
                    raise InfrastructureError(
                        f"the {self.environment.name} fork server is gone: {error}"
                    ) from error
        try:
            peer.settimeout(_CONTROL_TIMEOUT)
            greeting, _ = receive(peer)
            problem = str(greeting.get("error", ""))
        except (Closed, TimeoutError):
            problem = "it sent no greeting"
        if problem:
            peer.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            self.reap(pid)
            raise InfrastructureError(
                f"a process of the {self.environment.name} cell did not start: {visible(problem)}"
            )
        return peer, pid

    def _fork(self, log: int) -> tuple[socket.socket, int]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        rules = None if self._confinement is None else asdict(self._confinement)
        message = {"op": "fork", "scratch": self._scratch, "confinement": rules}
        ours, peer = socket.socketpair()
        try:
            return ours, int(self._exchange(message, [peer.fileno(), log])["pid"])
        except (Closed, TimeoutError):
            ours.close()
            raise
        finally:
            peer.close()

    def _exchange(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        """Send a control message, and return its answer.  Raises Closed, TimeoutError."""
        assert self._control is not None
        self._number += 1
        send(self._control, message | {"number": self._number}, fds)
        while True:
            answer, _ = receive(self._control)
            if answer.get("number") == self._number:
                return answer

    def reap(self, pid: int) -> int | None:
        """The exit status of a kernel process that was killed (negative: a signal), or None if it
        is unknown.

        The fork server also kills the processes that it left, and removes its scratch directory.
        """
        if self._control is None:
            return None
        try:
            with self._lock:
                status = self._exchange({"op": "reap", "pid": pid})["exit"]
        except (Closed, TimeoutError):
            return None
        return None if status is None else int(status)

    def close(self) -> None:
        """End the fork server, which kills its kernel processes."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # A stopped process would never notice that the judge has disconnected.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""

    def _start(self) -> None:
        self.close()
        self._confinement = confinement([state_directory()])
        self._scratch = tempfile.mkdtemp(prefix="verify-cell-")
        ours, peer = socket.socketpair()
        # Its output is needed only if it does not start.
        with tempfile.TemporaryFile() as output:
            program = starter.Program(
                module=CHILD,
                arguments=[str(peer.fileno()), *self.environment.preloads],
                environment=environment_of(self.environment.variables),
                output=output.fileno(),
                keep=[peer.fileno()],
            )
            self._process = starter.launch(starter.CELLS, program)
            peer.close()
            ours.settimeout(_START_TIMEOUT)
            try:
                receive(ours)
            except (Closed, TimeoutError) as error:
                ours.close()
                output.seek(0)
                text = visible(output.read()[-2000:].decode(errors="replace"))
                raise InfrastructureError(
                    f"the {self.environment.name} fork server did not start: {text}"
                ) from error
        ours.settimeout(_CONTROL_TIMEOUT)
        self._control = ours


def environment_of(own: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The environment variables of a process that runs kernels, its `own` ones among them.

    The internal variables of pytest and of the suite are not: they would tell a kernel which test
    this is.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name not in settings.INTERNAL
    }
    environment |= variables() | dict(own)
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return bundle.for_children(other_triton.on_path(environment))
