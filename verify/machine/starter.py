"""Starters: processes that have imported what takes long, and fork others that need it.

`import torch` takes a second of CPU time, and the judge's modules another.  A campaign needs them
in each of its workers, and torch in each fork server.  So it has two starters: `CELLS` has imported
the child's side of a cell, and nothing of the judge; `JUDGES` has imported all.

A starter calls the main() of a module in a fork, which gets the arguments, environment variables,
directory and descriptors that `python -m module` would get.  `launch` asks a starter, or starts
Python where there is none: on another system than Linux, or if variables differ that only a start
of Python reads.

The client's end of a starter's socket is inherited by forks alone.  No kernel process has it: such
a process could start one that is not confined.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import NoReturn, cast

from verify.machine import leash

CELLS, JUDGES = "cells", "judges"
_LARGEST = 1 << 20  # bytes of a request
_MOST = 32  # descriptors of a request
_PATIENCE = 60.0  # seconds until a starter has imported and forked, on a busy machine
# Variables that Python and the libraries of torch read when they start, and never again.
_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "ATEN_")
_ALWAYS = ("PYTHONPATH",)  # a fork's sys.path is made from it


@dataclass(frozen=True, kw_only=True)
class Program:
    """A module to run as a program.

    output, errors, given: descriptors for its standard output, error (None: as output) and input
    (None: empty).  keep: descriptors that it gets under their numbers.  directory: where it runs
    (None: where this process does).  session: whether it leads a session of its own.  leashed:
    whether it ends when this process ends.
    """

    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str]
    output: int
    errors: int | None = None
    given: int | None = None
    keep: Sequence[int] = ()
    directory: str | None = None
    session: bool = False
    leashed: bool = False

    def descriptors(self, nothing: int) -> dict[int, int]:
        """Its descriptors: its own number -> this process's number."""
        given = nothing if self.given is None else self.given
        errors = self.output if self.errors is None else self.errors
        return {0: given, 1: self.output, 2: errors} | {number: number for number in self.keep}


@dataclass(frozen=True)
class _Request:
    """A program, as a starter gets it.

    numbers: of its descriptors, which come with the request in this order.  leash: the process with
    which it ends, or 0.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    numbers: Sequence[int]
    session: bool
    leash: int


@dataclass(frozen=True)
class _Starter:
    """The client's side of a starter.

    variables: those that it was started with.
    """

    socket: socket.socket
    variables: Mapping[str, str]

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables can be one of its forks."""
        return _at_start(self.variables) == _at_start(environment)


_starters: dict[str, _Starter] = {}  # by name; forks inherit them


class Forked:
    """A process that a starter forked: the part of subprocess.Popen that callers use."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reply = reply

    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while the process runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.  Raises subprocess.TimeoutExpired."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:
            self._reply.settimeout(timeout)
            said = self._reply.recv(_LARGEST)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            said = b""
        self._reply.close()
        if said:
            self.returncode = int(json.loads(said)["exit"])
        else:  # the starter was killed, and the process can still run
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL
        return self.returncode


Process = Forked | subprocess.Popen[bytes]


def launch(name: str, program: Program) -> Process:
    """Start a program; returns its Popen, or what behaves like one.

    name: the starter to ask.
    """
    with open(os.devnull, "rb") as nothing:
        fds = program.descriptors(nothing.fileno())
        forked = _ask(name, program, fds)
        if forked is not None:
            return forked
        parent = {leash.PARENT: str(os.getpid())} if program.leashed else {}
        return subprocess.Popen(
            [sys.executable, "-m", program.module, *program.arguments],
            cwd=program.directory,
            env={**program.environment, **parent},
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            pass_fds=program.keep,
            start_new_session=program.session,
        )


def has(name: str) -> bool:
    """Whether this process can ask that starter."""
    return name in _starters


def begin(name: str) -> None:
    """Fork a starter that has imported what this process has; it ends with this process.

    Call it while this process has one thread.
    """
    if not _possible():
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _starters[name] = _Starter(ours, dict(os.environ))
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return
    leash.die_with(parent)
    _end_with(_Server(theirs).serve())


def start(name: str, module: str, environment: Mapping[str, str]) -> None:
    """Start a starter that has imported that module alone.

    It ends when no process has the client's end of its socket any more.
    """
    if not _possible():
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    process.returncode = 0  # nobody waits for it, and Popen warns of that otherwise
    _starters[name] = _Starter(ours, dict(environment))


def leave(status: int) -> NoReturn:
    """End this process as Python does, except that no module is unloaded: torch's takes 0.3 s."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _possible() -> bool:
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open")


def _at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_AT_START) and name not in _ALWAYS
    }


def _ask(name: str, program: Program, fds: Mapping[int, int]) -> Forked | None:
    """The process that the starter has forked; None if no starter can."""
    starter = _starters.get(name)
    if starter is None or not starter.can_start(program.environment):
        return None
    request = _Request(
        module=program.module,
        arguments=program.arguments,
        environment=dict(program.environment),
        directory=program.directory or os.getcwd(),
        numbers=list(fds),
        session=program.session,
        leash=os.getpid() if program.leashed else 0,
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            said = json.dumps(asdict(request)).encode()
            socket.send_fds(starter.socket, [said], [theirs.fileno(), *fds.values()])
        ours.settimeout(_PATIENCE)
        answer = ours.recv(_LARGEST)
    except OSError as error:
        if error.errno == errno.EMSGSIZE:  # too many variables for one message
            ours.close()
            return None
        answer = b""
    if not answer:  # the starter was killed
        ours.close()
        _starters.pop(name).socket.close()
        return None
    return Forked(int(json.loads(answer)["pid"]), ours)


@dataclass
class _Server:
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
        said, fds, _, _ = socket.recv_fds(self.requests, _LARGEST, _MOST)
        if not said:
            return lambda: 0
        request, parent = _Request(**json.loads(said)), os.getpid()
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


def _say(reply: socket.socket, answer: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        reply.send(json.dumps(answer).encode())


def _end_with(run: Callable[[], object]) -> NoReturn:
    """Run it and end this fork, which must never return to what it was forked from."""
    try:
        status = _status(run())
    except SystemExit as end:
        status = _status(end.code)
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


def _status(code: object) -> int:
    """The exit code of sys.exit(code)."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _become(request: _Request, fds: list[int], server: _Server) -> object:
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
    _close_but({*request.numbers, *(starter.socket.fileno() for starter in _starters.values())})
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # it depends on the variables
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
    _end_with(_Server(socket.socket(fileno=int(sys.argv[1]))).serve())


_LIBRARY = _library()

if __name__ == "__main__":
    main()
