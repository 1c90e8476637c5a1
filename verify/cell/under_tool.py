"""A kernel process under a tool (a sanitizer, a profiler): a cell whose only process is a new
program.

The process is not forked from a fork server, since a tool inserts its library before CUDA when a
program starts.  It runs cases until one ends it; the remaining cases need a fresh process.  At the
end the tool writes its records.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from verify import bundle
from verify.cell.arena import Arena
from verify.cell.descendants import descendants
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError, Reply
from verify.cell.untrusted_text import visible
from verify.machine import other_triton, settings

_START_TIMEOUT = 180.0  # seconds to import torch under the tool on a busy machine
_GRACE = 90.0  # seconds for the tool to write its records after the program's end
_HANGING = 15.0  # the same, after a program that was killed since it did not answer
_POLL = 0.2


class Ended(Exception):  # noqa: N818 - the process's end, not an error of ours
    """The process has ended; a cell under a tool starts no second one."""


class _Wrapped(ForkServer):
    """Starts a cell's kernel process as a new program under a tool's command line."""

    def __init__(self, environment: Environment, command: Sequence[str]) -> None:
        super().__init__(environment)
        self._command = tuple(command)

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """Start the program.  Raises InfrastructureError if it does not connect."""
        # The socket has a name because a tool need not pass descriptors to the program.
        folder = tempfile.mkdtemp(prefix="verify-")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"{folder}/s")
                listener.listen(1)
                listener.settimeout(_POLL)
                self._process = self._popen(f"{folder}/s", log)
                return self._accept(listener), self._process.pid
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _popen(self, path: str, log: int) -> subprocess.Popen[bytes]:
        variables = (
            os.environ
            | dict(self.environment.variables)
            | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        )
        # expandable segments have no exact extents
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            variables.pop(name, None)
        variables = bundle.for_children(other_triton.on_path(variables))
        return subprocess.Popen(
            [*self._command, path],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _accept(self, listener: socket.socket) -> socket.socket:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
        self.reap(self._process.pid, 0.0)
        raise InfrastructureError(
            f"the {self.environment.name} program did not connect under the tool"
        )

    def reap(self, pid: int, grace: float = _GRACE) -> int | None:
        """Wait for the end and return the exit status; None if the process had to be killed."""
        assert self._process is not None
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what is left of its group
        self._process.wait()
        return status


class ToolCell(Cell):
    """A cell with one kernel process, under a tool.

    prefix: the tool's command line.  program: the module that is the process; it connects to the
    socket whose path is its argument.  Its output is the tool's report.
    """

    most_output = 1 << 30

    def __init__(self, environment: Environment, prefix: Sequence[str], program: str) -> None:
        self._program = _Wrapped(environment, [*prefix, sys.executable, "-m", program])
        super().__init__(self._program)
        self.exit_code: int | None = None
        self.hung = ""  # what it did not answer, in words
        self.refused = ""  # its last reply, if that was not "ok"
        self.built = 0.0  # seconds in which the program has compiled
        self._asked = 0.0  # when that was last asked

    def finish(self) -> int | None:
        """End the program normally; returns the tool's exit code, or None if it had to be
        killed."""
        self._end_process()
        return self.exit_code

    @property
    def output(self) -> str:
        """The end of the program's standard output and error."""
        return visible(self.printed(1500)).strip()

    def printed(self, most: int) -> str:
        """The last `most` bytes of the same, as they came: not yet `visible`."""
        return self._output.end(most)

    def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
        """Like Cell.run; keeps a reply that is not "ok": the judge asks again, in a fresh process,
        and there is none."""
        reply = super().run(path, request, arena)
        trace = str(reply.data.get("traceback", ""))
        self.refused = "" if reply.ok else f"{reply.status}: {reply.message} {trace}".strip()
        return reply

    def _ensure_process(self) -> None:
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self._end_process()
        if self._socket is None and self.process_number:
            raise Ended
        super()._ensure_process()

    def _end_process(self, grace: float = _GRACE) -> int | None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.exit_code = self._program.reap(self._pid, grace)
        return self.exit_code

    def _end_hanging(self) -> None:
        # The program, which would wait for its kernel, and not the tool: it then writes its files.
        for pid in descendants(self._pid) or [self._pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._end_process(_HANGING)
        patience = settings.seconds("VERIFY_DEADLINE", self.environment.patience)
        self.hung = f"no answer within {patience:g} s; killed"

    def _compiles(self) -> bool:
        before, self._asked = self._asked, time.monotonic()
        builds = super()._compiles()
        self.built += self._asked - before if builds and self._asked - before < 1.0 else 0.0
        return builds
