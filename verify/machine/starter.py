"""Starters: processes that have imported what takes long, and fork others that need it.

`import torch` takes a second of CPU time, and the judge's modules another.  A campaign needs them
in each of its workers, and torch in each fork server.  So it has two starters: `CELLS` has imported
the child's side of a cell, torch with it, and nothing of the judge; `JUDGES` has imported all.  It
is a fork of a fork of the first: torch is imported once.

A starter calls the main() of a module in a fork, which gets the arguments, environment variables,
directory, descriptors and cores that `python -m module` would get.  `launch` asks a starter, or
starts Python where there is none: on another system than Linux, or if variables differ that only a
start of Python reads.

The client's end of a starter's socket is inherited by forks alone.  No kernel process has it: such
a process could start one that is not confined.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from verify.machine import leash, starter_process
from verify.machine.settings import KIND_FILES, STARTER
from verify.machine.starter_process import LARGEST, Request, Server, end_with, inherited

CELLS, JUDGES = "cells", "judges"
_PATIENCE = 180.0  # seconds until a starter has imported and forked, on a busy machine
# Variables that Python and the libraries of torch read when they start, and never again.
_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "ATEN_",
    KIND_FILES,
)
_ALWAYS = ("PYTHONPATH",)  # a fork's sys.path is made from it
# A judge sets its number of threads after its fork, so it can do without these.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
        self._asking = threading.Lock()  # the exit code comes once

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
        if not self._asking.acquire(timeout=-1 if timeout is None else timeout):
            return self.returncode
        try:
            return self._received(timeout)
        finally:
            self._asking.release()

    def _received(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:
            self._reply.settimeout(timeout)
            said = self._reply.recv(LARGEST)
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
    # This process's own leash is not the program's.
    own = {key: value for key, value in program.environment.items() if key != leash.PARENT}
    program = replace(program, environment=own)
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


def launch_root(name: str, program: Program) -> Process:
    """`launch` a program that calls `adopt`, and can then ask the starter itself.

    Of what only a start of Python reads, its numbers of threads can differ from the starter's.
    """
    starter = _starters.get(name)
    if starter is None:
        return launch(name, program)
    own, given = _at_start(program.environment), _at_start(starter.variables)
    differ = {each: own.get(each) for each in _THREADS if own.get(each) != given.get(each)}
    descriptor = starter.socket.fileno()
    said = json.dumps({"name": name, "descriptor": descriptor, "variables": differ})
    kept = {name: value for name, value in program.environment.items() if name not in differ}
    environment = kept | {each: given[each] for each in differ if each in given}
    if not starter.can_start(environment):
        return launch(name, program)
    return launch(
        name,
        replace(
            program,
            environment=environment | {STARTER: said},
            keep=[*program.keep, descriptor],
        ),
    )


def adopt() -> None:
    """In a program that `launch_root` started: ask its starter from now on, and restore the
    variables that the starter has otherwise.  Another program is left as it is.

    Call it before numbers of threads are read.
    """
    said = os.environ.pop(STARTER, None)
    if said is None:
        return
    found = json.loads(said)
    client = socket.socket(fileno=found["descriptor"])
    client.set_inheritable(False)
    _add(found["name"], client, os.environ)
    for name, value in found["variables"].items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


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
    _add(name, ours, os.environ)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return
    leash.die_with(parent)
    end_with(Server(theirs).serve())


def start(name: str, module: str, environment: Mapping[str, str], *, session: bool = False) -> None:
    """Start a starter that has imported that module alone.

    session: whether it leads a session of its own, so that Ctrl-C is not for its forks; when this
    process ends in an orderly way, the starter and its forks are killed.

    It ends when no process has the client's end of its socket any more.
    """
    if not _possible():
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", starter_process.__name__, str(theirs.fileno()), module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=session,
        )
    if session:
        atexit.register(_end, process.pid, os.getpid())
    process.returncode = 0  # no wait() follows, and Popen warns if a process has no exit code
    _add(name, ours, environment)


def _add(name: str, client: socket.socket, variables: Mapping[str, str]) -> None:
    if name in _starters:  # of the process that this one is a fork of
        _drop(name)
    _starters[name] = _Starter(client, dict(variables))
    inherited.add(client.fileno())


def _end(group: int, owner: int) -> None:
    """Kill a starter and its forks, from the process that started it."""
    if os.getpid() == owner:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _drop(name: str) -> None:
    client = _starters.pop(name).socket
    inherited.discard(client.fileno())
    client.close()


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
    request = Request(
        module=program.module,
        arguments=program.arguments,
        environment=dict(program.environment),
        directory=program.directory or os.getcwd(),
        numbers=list(fds),
        session=program.session,
        leash=os.getpid() if program.leashed else 0,
        cores=sorted(os.sched_getaffinity(0)),
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            said = json.dumps(asdict(request)).encode()
            socket.send_fds(starter.socket, [said], [theirs.fileno(), *fds.values()])
        ours.settimeout(_PATIENCE)
        answer = ours.recv(LARGEST)
    except OSError as error:
        if error.errno == errno.EMSGSIZE:  # too many variables for one message
            ours.close()
            return None
        answer = b""
    if not answer:  # the starter was killed
        ours.close()
        _drop(name)
        return None
    return Forked(int(json.loads(answer)["pid"]), ours)
