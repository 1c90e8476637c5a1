"""The judge's side of a fork server: the process of one environment, from which lives are
forked."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from typing import Any

from verify import bundle
from verify.cell.confinement import Confinement, confinement, variables
from verify.cell.protocol import Closed, receive, send
from verify.cell.untrusted_text import visible
from verify.machine import settings
from verify.machine.places import state_directory

ROOT = bundle.ROOT
_START_TIMEOUT = 180.0  # seconds for a fork server to import torch on a busy machine
# seconds for one that runs to fork, or to wait for the end of what was killed
_CONTROL_TIMEOUT = 20.0
_END_TIMEOUT = 15.0  # seconds to end its lives when the judge hangs up


class InfrastructureError(RuntimeError):
    """The cell itself could not be had; no verdict on any kernel."""


@dataclass(frozen=True)
class Environment:
    """What a cell's process sees: a name for reports, environment variables, and whether kernels
    run on "cuda" or "cpu"."""

    name: str
    device: str
    variables: tuple[tuple[str, str], ...] = ()
    patience: float = 60.0  # seconds for one request: any run may compile a build


# One compile thread per cell: there are as many cells as cores.
PLAIN_CUDA = Environment("cuda", "cuda", (("TORCHINDUCTOR_COMPILE_THREADS", "1"),), patience=120.0)
# Compiling needs no device; Triton must not interpret.
COMPILER = Environment(
    "compiler", "cpu", (("TRITON_INTERPRET", "0"), ("CUDA_VISIBLE_DEVICES", "")), patience=300.0
)
# Without a GPU Triton kernels run in its interpreter; the switch does nothing to kernels that are
# not Triton's.
PLAIN_CPU = Environment("cpu", "cpu", (("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", "")))


class ForkServer:
    """The process of one environment, with torch imported, from which lives are forked."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()  # one caller at a time on the control socket
        # of the last control message: an answer that comes too late is none to the next
        self._number = 0
        self._scratch = ""  # a directory for those of the lives
        self._confinement: Confinement | None = None

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """A new life: its socket and process id.  `log` is the descriptor that gets its output."""
        with self._lock:
            try:
                life, pid = self._fork(log)
            except (
                Closed,
                TimeoutError,
            ):  # a kernel may have killed it, and its end need not have been seen yet
                self.close()
                try:
                    life, pid = self._fork(log)
                except (Closed, TimeoutError) as error:
                    raise InfrastructureError(
                        f"the {self.environment.name} fork server is gone: {error}"
                    ) from error
        try:
            life.settimeout(_CONTROL_TIMEOUT)
            greeting, _ = receive(life)
            wrong = str(greeting.get("error", ""))
        except (Closed, TimeoutError):
            wrong = "it said nothing"
        if wrong:
            life.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            self.reap(pid)
            raise InfrastructureError(
                f"a life of the {self.environment.name} cell did not begin: {visible(wrong)}"
            )
        return life, pid

    def _fork(self, log: int) -> tuple[socket.socket, int]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        held = None if self._confinement is None else asdict(self._confinement)
        message = {"op": "fork", "scratch": self._scratch, "confinement": held}
        mine, theirs = socket.socketpair()
        try:
            return mine, int(self._exchange(message, [theirs.fileno(), log])["pid"])
        except (Closed, TimeoutError):
            mine.close()
            raise
        finally:
            theirs.close()

    def _exchange(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        """Say something to the process, and return its answer to just that.  Raises Closed,
        TimeoutError."""
        assert self._control is not None
        self._number += 1
        send(self._control, message | {"number": self._number}, fds)
        while True:
            answer, _ = receive(self._control)
            if answer.get("number") == self._number:
                return answer

    def reap(self, pid: int) -> int | None:
        """Exit status of a life that has ended (negative: a signal), or None if the fork server
        cannot say.

        What the life has left running is killed, and its scratch is removed.
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
        """End the process; it kills what lives are left."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # One that was stopped would never see that the judge is gone.
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
        mine, theirs = socket.socketpair()
        # What pytest and the suite's processes tell each other says which test this is.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_") and name not in settings.INTERNAL
        }
        environment |= variables() | dict(self.environment.variables)
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = bundle.for_children(environment)
        command = [sys.executable, "-m", "verify.cell.child", str(theirs.fileno())]
        # Its own words matter only when it fails to start.
        with tempfile.TemporaryFile() as words:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
            theirs.close()
            mine.settimeout(_START_TIMEOUT)
            try:
                receive(mine)
            except (Closed, TimeoutError) as error:
                mine.close()
                words.seek(0)
                text = visible(words.read()[-2000:].decode(errors="replace"))
                raise InfrastructureError(
                    f"the {self.environment.name} fork server did not start: {text}"
                ) from error
        mine.settimeout(_CONTROL_TIMEOUT)
        self._control = mine
