"""One process of an environment for all tests of a worker that load kernels or open a judge.

Each judge and each roster starts a fork server, which imports torch.  That takes a second of CPU
time, while a test asks for only three launches.  Kernel processes start in the directory of the
test that started the fork server, so kernels must name files by absolute paths.  Tests of the fork
server itself (test_cell*.py) start their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass

from verify.cell.confinement import confinement
from verify.cell.fork_server import Environment, ForkServer
from verify.machine import settings
from verify.machine.places import state_directory


@dataclass(frozen=True)
class _Key:
    """What a fork server gets at its start: its environment and the environment variables."""

    environment: Environment
    variables: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Parked:
    """The process of a closed fork server, ready for the next one."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    number: int
    scratch: str


_MAX_PARKED = 2  # each has torch loaded
_parked: dict[_Key, _Parked] = {}


class SharedForkServer(ForkServer):
    """A fork server that takes over the parked process of an equal one, if there is one."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._children: set[int] = set()
        self._key: _Key | None = None
        self._sound = False  # whether the process has answered the last request

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """Like ForkServer.fork; remembers the kernel process."""
        self._sound = False
        peer, pid = super().fork(log)
        self._sound = True
        self._children.add(pid)
        return peer, pid

    def reap(self, pid: int) -> int | None:
        """Like ForkServer.reap; forgets the kernel process."""
        self._children.discard(pid)
        return super().reap(pid)

    def close(self) -> None:
        """End the kernel processes and park the fork server.

        A fork server that does not answer is ended instead, as is the second of its kind.
        """
        for pid in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.reap(pid)
        if not self._sound or self._key in _parked or self._ended():
            super().close()
            return
        if len(_parked) >= _MAX_PARKED:
            _end(next(iter(_parked)))
        assert self._key is not None
        assert self._process is not None
        assert self._control is not None
        _parked[self._key] = _Parked(self._process, self._control, self._number, self._scratch)
        self._process = self._control = None
        self._scratch = ""

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _start(self) -> None:
        self._key = _Key(self.environment, _variables())
        if self._key in _parked:
            self._take(_parked.pop(self._key))
        if self._ended():
            super()._start()
        else:
            self._confinement = confinement([state_directory()])

    def _take(self, parked: _Parked) -> None:
        self._process = parked.process
        self._control = parked.control
        self._number = parked.number
        self._scratch = parked.scratch


def end_all() -> None:
    """End all parked fork servers."""
    for key in list(_parked):
        _end(key)


def _end(key: _Key) -> None:
    fork_server = SharedForkServer(key.environment)
    fork_server._take(_parked.pop(key))
    fork_server.close()


def _variables() -> frozenset[tuple[str, str]]:
    """The environment variables that a fork server's process gets."""
    hidden = {name for name in os.environ if name.startswith("PYTEST_")} | set(settings.INTERNAL)
    return frozenset((name, value) for name, value in os.environ.items() if name not in hidden)
