"""The starter's own process: it forks the programs that `verify.machine.starter` asks for."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import NoReturn, cast

from verify.machine import leash

LARGEST = 1 << 20  # bytes of a request
_MOST = 32  # descriptors of a request
inherited: set[int] = set()  # descriptors of starters' clients, which every fork keeps


@dataclass(frozen=True)
class Request:
    """A program, as a starter gets it.

    numbers: of its descriptors, which come with the request in this order.  leash: the process with
    which it ends, or 0.  cores: on which it may run.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    numbers: Sequence[int]
    session: bool
    leash: int
    cores: Sequence[int]


@dataclass
class Server:
    """The starter's side: forks what is asked for until no client is left."""

    requests: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> Callable[[], object]:
        """Serve until no client is left; returns what this process, or a fork of it, is to do."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the clients
        self.selector.register(self.requests, selectors.EVENT_READ, self._fork)
        while True:
            for key, _ in self.selector.select():
                found: Callable[[], object] | None = key.data()
                if found is not None:
                    return found

    def _fork(self) -> Callable[[], object] | None:
        said, fds, _, _ = socket.recv_fds(self.requests, LARGEST, _MOST)
        if not said:
            return lambda: 0
        request, parent = Request(**json.loads(said)), os.getpid()
        pid = os.fork()
        if not pid:
            if request.leash:
                leash.die_with(parent)  # and with its holder, who can be another: `_leash`
            # Objects must not close descriptors whose numbers the program gets: all stay.
            return partial(_become, request, fds[1:], self)
        for fd in fds[1:]:
            os.close(fd)
        reply, fork = socket.socket(fileno=fds[0]), os.pidfd_open(pid)
        held = self._leash(pid, request.leash) if request.leash else None
        self.selector.register(
            fork, selectors.EVENT_READ, partial(self._reap, fork, pid, reply, held)
        )
        _say(reply, {"pid": pid})
        return None

    def _leash(self, pid: int, holder: int) -> int | None:
        """Kill the fork when its holder ends; returns the descriptor that says so."""
        try:
            held = os.pidfd_open(holder)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
            return None

        def pull() -> None:
            self.selector.unregister(held)
            os.kill(pid, signal.SIGKILL)  # not reaped yet: then `held` would be closed

        self.selector.register(held, selectors.EVENT_READ, pull)
        return held

    def _reap(self, fork: int, pid: int, reply: socket.socket, held: int | None) -> None:
        self.selector.unregister(fork)
        _, status = os.waitpid(pid, 0)
        os.close(fork)
        if held is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(held)
            os.close(held)
        _say(reply, {"exit": os.waitstatus_to_exitcode(status)})
        reply.close()


def leave(status: int) -> NoReturn:
    """End this process as Python does, except that no module is unloaded: torch's takes 0.3 s."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def end_with(run: Callable[[], object]) -> NoReturn:
    """Run it and end this fork, which must never return to what it was forked from."""
    try:
        status = _status(run())
    except SystemExit as end:
        status = _status(end.code)
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


def _say(reply: socket.socket, answer: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        reply.send(json.dumps(answer).encode())


def _status(code: object) -> int:
    """The exit code of sys.exit(code)."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _become(request: Request, fds: list[int], server: Server) -> object:
    """Be the program that was asked for; returns what its main() returns.

    server: stays as long as this process.
    """
    if request.session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    above = max(request.numbers) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd, number in zip(high, request.numbers, strict=True):
        os.dup2(fd, number)
    _close_but(inherited.union(request.numbers))
    os.chdir(request.directory)
    os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # it depends on the variables
    if (device := sys.modules.get("verify.machine.device")) is not None:
        device.forget_gpus()  # so do these
    given = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    own = [] if sys.flags.safe_path else [request.directory]
    sys.path[:] = [*own, *filter(None, given), *_LIBRARY]
    module = import_module(request.module)
    sys.argv = [str(module.__file__), *request.arguments]
    return cast(Callable[[], object], module.main)()


def _close_but(kept: set[int]) -> None:
    """Close all descriptors above 2 that are not kept."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _library() -> list[str]:
    """What Python itself puts into sys.path: neither a program's directory nor PYTHONPATH."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = set(given) if sys.flags.safe_path else {*given, *sys.path[:1]}
    return [entry for entry in sys.path if entry not in own]


def main() -> None:
    """Serve on descriptor argv[1], with module argv[2] imported."""
    import_module(sys.argv[2])
    gc.collect()
    gc.freeze()
    end_with(Server(socket.socket(fileno=int(sys.argv[1]))).serve())


_LIBRARY = _library()

if __name__ == "__main__":
    main()
