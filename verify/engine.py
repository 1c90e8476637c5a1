"""Engine: pytest in a child process, with live progress read from the evidence that it leaves."""

from __future__ import annotations

import contextlib
import os
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verify.cell.cell import ROOT
from verify.discovery import judge_changed
from verify.evidence import Evidence, load, new_run_id
from verify.places import state_directory
from verify.xfails import xfails_in

CLEAN, FAILED, USAGE, INFRASTRUCTURE = 0, 1, 2, 3
_UNTIL = "VERIFY_UNTIL"  # tells the child when time is over, in seconds since the epoch
_POLL = 0.5  # seconds
_GRACE = 60.0  # seconds beyond a deadline for cases under way and the report


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a command asks of the engine.  workers: "auto", or a number; 0 runs in one process."""

    kernels: tuple[Path, ...] = ()
    profile: str | None = None
    examples: int | None = None
    seed: int | None = None
    workers: str = "auto"
    run_id: str = field(default_factory=new_run_id)
    report_dir: Path | None = None
    select: str = ""

    @property
    def directory(self) -> Path:
        return state_directory() / "runs" / self.run_id

    def command(self) -> list[str]:
        """The pytest command line."""
        words = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "properties"), "--rootdir", str(ROOT)]
        words += ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short"]
        words += ["-n", self.workers, "--dist", "worksteal"] if self.workers != "0" else []
        words += ["--run-id", self.run_id]
        words += ["--profile", self.profile] if self.profile else []
        words += ["--examples", str(self.examples)] if self.examples is not None else []
        words += ["--hypothesis-seed", str(self.seed)] if self.seed is not None else []
        words += ["--report-dir", str(self.report_dir)] if self.report_dir is not None else []
        words += ["-k", self.select] if self.select else []
        for kernel in self.kernels:
            words += ["--kernel", str(kernel)]
        return words


def out_of_time() -> bool:
    """Whether the deadline that this process was started with is past; never, where there is none."""
    return time.time() > float(os.environ.get(_UNTIL, "inf"))


def say(console: Console, text: str) -> None:
    """Bad news, as it is: unwrapped, so that a command in it can be copied."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def carry_out(order: Order, console: Console, deadline: float | None = None) -> int:
    """Run the campaign and return an exit code.  Past `deadline` (time.monotonic) no new case is begun."""
    with tempfile.TemporaryFile("w+") as words:
        variables = dict(os.environ)
        if deadline is not None:
            variables[_UNTIL] = str(time.time() + deadline - time.monotonic())
        process = subprocess.Popen(
            order.command(),
            stdout=words,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
        try:
            with _interruptible():
                _watch(process, order, console, deadline)
        except KeyboardInterrupt:
            return INFRASTRUCTURE
        finally:
            # The workers and their cells are in its group; none may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        words.seek(0)
        return _status(process.returncode, order, words.read(), console)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, as `timeout` and job schedulers send it, is taken for Ctrl-C, so that the workers are ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(process: subprocess.Popen[bytes], order: Order, console: Console, deadline: float | None) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, tally = progress.add_task("starting", total=None), _Tally()
        while process.poll() is None:
            time.sleep(_POLL)
            tally.read(order.directory)
            progress.update(task, completed=tally.begun, description=f"cases judged, {tally.failing} failing verdicts")
            if deadline is not None and time.monotonic() > deadline + _GRACE:
                return


@dataclass
class _Tally:
    """Cases begun and failing verdicts so far, by a cheap scan of what the evidence has grown by since the last look."""

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


def _status(returncode: int, order: Order, output: str, console: Console) -> int:
    evidence = evidence_of(order)
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
    if returncode != 0:
        console.print(output.strip()[-4000:], markup=False, highlight=False)
        return INFRASTRUCTURE
    return CLEAN


def failing(evidence: Evidence) -> bool:
    """Whether a verdict fails that no known defect explains.  Raises XfailsError."""
    return bool(xfails_in(evidence).unexpected(evidence.verdicts))


def evidence_of(order: Order) -> Evidence | None:
    """What the run has recorded, or None if it never began."""
    return load(order.directory) if order.directory.exists() else None
