"""One process of an environment for all tests of a worker that load kernels or open a judge.

Each judge and each roster starts a fork server, which imports torch: a second of CPU time, where a
test asks for three launches.  Lives begin in the directory of the test that started the process, so
that accused kernels name files by absolute paths.  Tests of the fork server itself (test_cell*.py)
start their own.
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
    """What the process of a fork server has from its start: its environment, and the variables."""

    environment: Environment
    variables: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Parked:
    """A process that nobody uses."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    number: int
    scratch: str


_MOST = 2  # of those that are parked: each has torch loaded
_parked: dict[_Key, _Parked] = {}


class SharedForkServer(ForkServer):
    """A fork server that goes on with the process of one that was closed, if there is one like
    it."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._lives: set[int] = set()
        self._key: _Key | None = None
        self._sound = False  # whether the process answered last

    def fork(self, log: int) -> tuple[socket.socket, int]:
        """As ForkServer.fork; remembers the life."""
        self._sound = False
        life, pid = super().fork(log)
        self._sound = True
        self._lives.add(pid)
        return life, pid

    def reap(self, pid: int) -> int | None:
        """As ForkServer.reap; forgets the life."""
        self._lives.discard(pid)
        return super().reap(pid)

    def close(self) -> None:
        """End the lives and park the process; end one that is ill, or the second of its kind."""
        for pid in list(self._lives):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.reap(pid)
        if not self._sound or self._key in _parked or self._ended():
            super().close()
            return
        if len(_parked) >= _MOST:
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
    """End what is parked."""
    for key in list(_parked):
        _end(key)


def _end(key: _Key) -> None:
    fork_server = SharedForkServer(key.environment)
    fork_server._take(_parked.pop(key))
    fork_server.close()


def _variables() -> frozenset[tuple[str, str]]:
    """What of the environment a fork server's process is given."""
    told = {name for name in os.environ if name.startswith("PYTEST_")} | set(settings.INTERNAL)
    return frozenset((name, value) for name, value in os.environ.items() if name not in told)
