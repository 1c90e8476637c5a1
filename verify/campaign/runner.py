"""Engine: pytest in a child process, with live progress read from the evidence that it leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from verify.bundle import ROOT
from verify.campaign import halt
from verify.evidence import Evidence, load, new_run_id
from verify.evidence.errors import read as errors_of
from verify.evidence.explanation import explain
from verify.evidence.judge_version import judge_changed
from verify.evidence.known_failures import handed_on, xfails_in
from verify.machine import leash
from verify.machine.places import state_directory

CLEAN, FAILED, USAGE, INFRASTRUCTURE = 0, 1, 2, 3
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a disk that takes nothing
_PYTEST_USAGE, _PYTEST_NOTHING = 4, 5  # exit codes of pytest
_POLL = 0.25  # seconds
_GRACE = 60.0  # seconds beyond a deadline for cases under way and the report
_REFUSED = re.compile(rf"\w*Error: (\[Errno (?:{'|'.join(map(str, NO_SPACE))})\] [^\n]*)")


class RunnerError(Exception):
    """A campaign that could not be had; the message is one line, `status` the exit code."""

    def __init__(self, message: str, status: int = INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Somebody ended the campaign by SIGINT (Ctrl-C) or SIGTERM; what was judged is on record."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a command asks of the engine.

    oracles: files with further ones.  workers: "auto", or a number; 0 runs in one process.
    exit_first: stop at the first failing verdict.
    """

    kernels: tuple[Path, ...] = ()
    oracles: tuple[Path, ...] = ()
    profile: str | None = None
    examples: int | None = None
    seed: int | None = None
    workers: str = "auto"
    run_id: str = field(default_factory=new_run_id)
    report_dir: Path | None = None
    select: str = ""
    exit_first: bool = False

    @property
    def directory(self) -> Path:
        return state_directory() / "runs" / self.run_id

    def command(self) -> list[str]:
        """The pytest command line."""
        words = [
            sys.executable,
            "-m",
            "pytest",
            str(ROOT / "tests" / "properties"),
            "--rootdir",
            str(ROOT),
        ]
        # pytest's default mode puts ROOT at the head of sys.path, where its folders would hide
        # packages of the same names.
        words += ["--import-mode", "importlib"]
        words += [
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
            "-q",
            "--no-header",
            "--tb=short",
        ]
        words += ["-n", self.workers, "--dist", "worksteal"] if self.workers != "0" else []
        words += ["--run-id", self.run_id]
        words += ["--profile", self.profile] if self.profile else []
        words += ["--examples", str(self.examples)] if self.examples is not None else []
        words += ["--hypothesis-seed", str(self.seed)] if self.seed is not None else []
        words += ["--report-dir", str(self.report_dir)] if self.report_dir is not None else []
        words += ["-k", self.select] if self.select else []
        words += ["--exitfirst"] if self.exit_first else []
        for kernel in self.kernels:
            words += ["--kernel", str(kernel)]
        for oracle in self.oracles:
            words += ["--oracle", str(oracle)]
        return words


def say(console: Console, text: str) -> None:
    """Bad news, as it is: unwrapped, so that a command in it can be copied."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def execute(order: RunRequest, console: Console, deadline: float | None = None) -> int:
    """Run the campaign and return an exit code.  Past `deadline` (time.monotonic) no new case is
    begun.

    Raises EngineError where it could not be had, Interrupted where somebody ended it.
    """
    try:
        order.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunnerError(_unwritable(order, str(error))) from None
    try:
        with _interruptible():
            return _execute(order, console, deadline)
    except KeyboardInterrupt:
        raise Interrupted from None
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise RunnerError(_unwritable(order, str(error))) from None


def _execute(order: RunRequest, console: Console, deadline: float | None) -> int:
    with tempfile.TemporaryFile("w+") as words:
        variables = os.environ | handed_on() | {leash.PARENT: str(os.getpid())}
        if deadline is not None:
            variables[halt.UNTIL] = str(deadline)
        process = subprocess.Popen(
            order.command(),
            stdout=words,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
        try:
            over = _watch(process, order, console, deadline)
        finally:
            # The workers and their cells are in its group; none may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        words.seek(0)
        return _status(0 if over else process.returncode, order, words.read(), console)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, as `timeout` and job schedulers send it, is taken for Ctrl-C, so that the workers
    are ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(
    process: subprocess.Popen[bytes], order: RunRequest, console: Console, deadline: float | None
) -> bool:
    """Show how far the campaign is until it ends; whether its time was over before that."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task, tally = progress.add_task("starting", total=None), _Tally()
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
            tally.read(order.directory)
            progress.update(
                task,
                completed=tally.begun,
                description=f"cases judged, {tally.failing} failing verdicts",
            )
            if deadline is not None and time.monotonic() > deadline + _GRACE:
                return True
    return False


@dataclass
class _Tally:
    """Cases begun and failing verdicts so far, by a cheap scan of what the evidence has grown by
    since the last look."""

    begun: int = 0
    failing: int = 0
    read_to: dict[Path, int] = field(default_factory=dict)

    def read(self, directory: Path) -> None:
        """Look again."""
        for path in directory.glob("*.jsonl"):
            begin = self.read_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self.read_to[path] = begin + len(text)
            self.begun += text.count(b'"kind":"begin"')
            self.failing += text.count(b'"outcome":"fail"')


def _status(returncode: int, order: RunRequest, output: str, console: Console) -> int:
    """The exit code of a campaign that has ended; raises EngineError where the child says why it
    did nothing."""
    if returncode == _PYTEST_USAGE:
        raise RunnerError(_said(output), USAGE)
    if returncode == _PYTEST_NOTHING and order.select:
        words = [f"nothing matches {order.select!r}", _names(order), *_unloaded(order)]
        raise RunnerError(f"-k: {'; '.join(words)}", USAGE)
    evidence = evidence_of(order)
    refused = _REFUSED.search(output) if returncode != CLEAN else None
    if refused is not None:
        if evidence is None or not evidence.verdicts or not failing(evidence):
            raise RunnerError(_unwritable(order, refused[1]))
        say(console, f"verify: {_unwritable(order, refused[1])}")
    if evidence is None or not evidence.verdicts:
        console.print(output.strip()[-4000:], markup=False, highlight=False)
        console.print("nothing was judged", style="bold red")
        return INFRASTRUCTURE
    changed = judge_changed(evidence)
    if changed is not None:
        say(console, changed)
        return INFRASTRUCTURE
    if failing(evidence):
        return FAILED
    if returncode != CLEAN:
        if not errors_of(order.directory):  # else these are shown, each in a line
            console.print(output.strip()[-4000:], markup=False, highlight=False)
        return INFRASTRUCTURE
    return CLEAN


def _said(output: str) -> str:
    """What pytest says of a usage error, in one line."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return lines[0].removeprefix("ERROR: ") if lines else output.strip()[-500:]


def _names(order: RunRequest, most: int = 12) -> str:
    """The names that a campaign's ids are made of, shortened, for somebody whose -k matches
    none."""
    evidence = evidence_of(order)
    entries = () if evidence is None else evidence.variants
    dtypes = {str(dtype) for entry in entries for dtype in entry.support.get("dtypes", ())}
    configs = {config for entry in entries for config in entry.configs}
    found = [*(entry.ref for entry in entries), *sorted(dtypes), *sorted(configs)]
    shown = ", ".join(found[:most])
    return f"ids are made of {shown}" + (
        f" and {len(found) - most} more" if len(found) > most else ""
    )


def _unloaded(order: RunRequest) -> list[str]:
    """One line for each file that does not load beside one that does: no id holds its names."""
    evidence = evidence_of(order)
    verdicts = () if evidence is None else evidence.verdicts
    loading = [verdict for verdict in verdicts if verdict.group == "loading"]
    return [explain(verdict).splitlines()[0] for verdict in loading]


def _unwritable(order: RunRequest, reason: str) -> str:
    return f"cannot write evidence to {order.directory}: {reason}"


def failing(evidence: Evidence) -> bool:
    """Whether a verdict fails that no known defect explains.  Raises XfailsError."""
    return bool(xfails_in(evidence).unexpected(evidence.verdicts))


def evidence_of(order: RunRequest) -> Evidence | None:
    """What the run has recorded, or None if it never began."""
    return load(order.directory) if order.directory.exists() else None
