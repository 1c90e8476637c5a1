"""A worker's side: the session that runs leases, as a child process, and its evidence.

The session and its cells run in a scratch directory of their own.  A session that dies is started
again, in a new one, at the next request.  It ends when the process that started it ends, even by
kill -9.  Imports nothing heavy: an engine's worker never imports torch, and no kernel runs in it.
The first session starts the worker's starter of cells, which imports torch; every session is a fork
of that starter, where there can be one.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from verify.bundle import for_children
from verify.campaign import halt, search_scope
from verify.campaign.leases.requests import Answer, Hello, Request
from verify.campaign.leases.sources import GIVEN
from verify.cell.fork_server import CHILD, environment_of
from verify.machine import starter
from verify.machine.cores import of_its_pytest
from verify.machine.places import state_directory
from verify.machine.settings import KIND_FILES

RUN = "leases"  # the name of a session's run
STOP = "failed"  # conftest.py's marker of a campaign that ends at its first failure
_FAILURES = "known-failures.txt"
_POLL = 0.2  # seconds
_START = 600.0  # seconds until a session has discovered its kernels
_LAST_WORDS = 600  # characters of a dead session's output
_PYTEST_USAGE = 4
_FAIL = b'"outcome":"fail"'


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is started with, from the coordinator.

    arguments: pytest's.  files: kernels, and further files that decide (oracles, kinds), as the
    command names them; a relative path is meant from the worker's directory.  kinds: those of
    --with.  variables: of the environment.  failures: stored cases, asked first.  seconds: until no
    case begins; None for all the time.
    """

    campaign: str
    arguments: tuple[str, ...]
    files: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    failures: str = ""
    seconds: float | None = None


class SessionError(Exception):
    """A session did not start, or died; the message says how, in one line.

    usage: whether pytest refused the arguments.
    """

    def __init__(self, message: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


class Executor:
    """One session and its scratch directory.

    failing: called with a line of evidence as soon as a verdict fails.
    """

    def __init__(self, spec: Spec, failing: Callable[[bytes], None], parent: Path) -> None:
        self.spec = spec
        self.failing = failing
        self.begun = time.monotonic()
        self._parent = parent
        self._scratch: Path | None = None
        self._process: starter.Process | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._read_to: dict[Path, int] = {}
        self.header = b""
        """The evidence that says who runs what: written before any lease."""

    @property
    def pid(self) -> int:
        """The process id of the session; 0 without one."""
        return 0 if self._process is None else self._process.pid

    @property
    def directory(self) -> Path | None:
        """The directory of the session's run."""
        return None if self._scratch is None else _run(self._scratch)

    def start(self) -> Hello:
        """Start a session, and return what it says of itself.  Raises SessionError."""
        self.close()
        scratch = self._scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=self._parent))
        arguments = self._lay_out(scratch)
        self._socket, theirs = socket.socketpair()
        self._unread = b""
        self._read_to = {}
        here = {name: value for name, value in os.environ.items() if not of_its_pytest(name)}
        variables = for_children(here | self.spec.variables)
        variables[GIVEN] = os.pathsep.join(str(scratch / each) for each in self.spec.files)
        if self.spec.kinds:
            variables[KIND_FILES] = os.pathsep.join(str(scratch / k) for k in self.spec.kinds)
        if self.spec.seconds is not None:
            variables[halt.UNTIL] = str(self.begun + self.spec.seconds)
        own = ["-p", "verify.campaign.leases.loop", "--lease-socket", str(theirs.fileno())]
        with (scratch / "output.txt").open("wb") as output, theirs:
            program = starter.Program(
                module="verify.campaign.session",
                arguments=[*arguments, *own],
                environment=variables,
                output=output.fileno(),
                keep=[theirs.fileno()],
                directory=str(scratch),
                session=True,
                leashed=True,
            )
            self._process = _started(program)
        line, self.header = self._reply(_START)
        return msgspec.json.decode(line, type=Hello)

    def ask(self, request: Request) -> tuple[Answer, bytes]:
        """Ask the session one thing; returns its answer and the lines of evidence that it wrote.

        A session that dies has an answer, too: an error that says how it died.
        """
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
            assert self._socket is not None
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
            line, evidence = self._reply(None)
        except (OSError, SessionError) as error:
            why = error if isinstance(error, SessionError) else self._last_words()
            evidence = self._new_lines()
            self.close()
            return Answer(errors=(("", "", str(why)),)), evidence
        return msgspec.json.decode(line, type=Answer), evidence

    def stop(self) -> None:
        """Let the session begin no further case."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                (self.directory / STOP).touch()

    def known(self, test: str) -> None:
        """Tell the session that another worker has a failing example of that test."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                search_scope.known(self.directory / "known", test)

    def close(self) -> None:
        """End the session and its cells, and remove the scratch directory."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # a fork that leads no session yet
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _lay_out(self, scratch: Path) -> list[str]:
        """Make the files that the session expects in its directory; returns pytest's arguments."""
        here = Path.cwd()
        for name in {*self.spec.files, *self.spec.kinds}:
            if not Path(name).is_absolute():
                link = scratch / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((here / name).resolve())
        folder = scratch / state_directory()
        folder.mkdir()
        (folder / _FAILURES).write_text(self.spec.failures, encoding="utf-8")
        return list(self.spec.arguments)

    def _reply(self, patience: float | None) -> tuple[bytes, bytes]:
        """The next line of the session, and the evidence written before it.  Raises
        SessionError."""
        assert self._socket is not None
        evidence = b""
        until = None if patience is None else time.monotonic() + patience
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._socket], [], [], _POLL)
            new = self._new_lines()
            evidence += new
            if _FAIL in new:
                for line in new.splitlines():
                    if _FAIL in line:
                        self.failing(line + b"\n")
            if ready:
                said = self._socket.recv(1 << 20)
                if not said:
                    raise self._last_words()
                self._unread += said
            elif until is not None and time.monotonic() > until:
                raise SessionError(f"the judge's process said nothing for {patience:.0f} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return line, evidence + self._new_lines()

    def _new_lines(self) -> bytes:
        """The whole lines of evidence that were written since the last call."""
        found = []
        for path in sorted(self.directory.glob("*.jsonl")) if self.directory else ():
            begin = self._read_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read_to[path] = begin + len(text)
            found.append(text)
        return b"".join(found)

    def _last_words(self) -> SessionError:
        if self._process is None or self._scratch is None:
            return SessionError("the judge's process did not start")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        status = self._process.poll()
        text = (self._scratch / "output.txt").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")]
        said = errors[0].removeprefix("ERROR: ") if errors else " / ".join(lines)[-_LAST_WORDS:]
        if status == _PYTEST_USAGE:
            return SessionError(said, usage=True)
        how = f"ended by signal {-status}" if status is not None and status < 0 else "ended"
        return SessionError(f"the judge's process {how}: {said or 'without a word'}")


def _run(scratch: Path) -> Path:
    return scratch / state_directory() / "runs" / RUN


def _started(program: starter.Program) -> starter.Process:
    """Start a program that ends with this process: a fork of the starter of cells, which has
    imported torch.  Raises SessionError.

    Where it cannot be a fork, the system ends it when the thread that started it ends, so that
    thread waits for ever.
    """
    found: list[starter.Process] = []
    ready = threading.Event()

    def start() -> None:
        try:
            if not starter.has(starter.CELLS):
                variables = environment_of(program.environment.items())
                starter.start(starter.CELLS, CHILD, variables, session=True)
            found.append(starter.launch_root(starter.CELLS, program))
        finally:
            ready.set()
        if isinstance(found[0], subprocess.Popen):
            found[0].wait()

    threading.Thread(target=start, name="verify-session", daemon=True).start()
    ready.wait()
    if not found:
        raise SessionError("the judge's process cannot be started")
    return found[0]
