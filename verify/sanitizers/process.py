"""A sanitized process: a cell whose only kernel process runs under the tool.

The process is not forked from a fork server, since the tool inserts its library before CUDA when a
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
from dataclasses import replace

from verify import bundle
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError
from verify.cell.untrusted_text import visible

_START_TIMEOUT = 180.0  # seconds to import torch under the tool on a busy machine
_GRACE = 90.0  # seconds for the tool to write its records after the program's end
_POLL = 0.2
_SLOWER = 5.0  # what a request may take, relative to a plain cell


class Ended(Exception):  # noqa: N818 - the process's end, not an error of ours
    """The process has ended; a sanitized cell starts no second one."""


def sanitized(environment: Environment) -> Environment:
    """The environment for a sanitizer: without torch's cache of allocations, and with longer
    deadlines."""
    variables = (*environment.variables, ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))
    return replace(environment, variables=variables, patience=environment.patience * _SLOWER)


class _Wrapped(ForkServer):
    """Starts a cell's kernel process as a new program under a tool's command line."""

    def __init__(self, environment: Environment, prefix: Sequence[str]) -> None:
        super().__init__(environment)
        self._prefix = tuple(prefix)

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
        variables = bundle.for_children(variables)
        command = [*self._prefix, sys.executable, "-m", "verify.sanitizers.child", path]
        return subprocess.Popen(
            command,
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


class SanitizedCell(Cell):
    """A cell with one kernel process, under a tool."""

    def __init__(self, environment: Environment, prefix: Sequence[str]) -> None:
        super().__init__(_Wrapped(sanitized(environment), prefix))
        self.exit_code: int | None = None

    def finish(self) -> int | None:
        """End the program normally; returns the tool's exit code, or None if it had to be
        killed."""
        self._end_process()
        return self.exit_code

    @property
    def output(self) -> str:
        """The end of the program's standard output and error."""
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 1500, 0))
        return visible(self._log.read().decode(errors="replace")).strip()

    def _ensure_process(self) -> None:
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self._end_process()
        if self._socket is None and self.process_number:
            raise Ended
        super()._ensure_process()

    def _end_process(self) -> int | None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.exit_code = self._fork_server.reap(self._pid)
        return self.exit_code
