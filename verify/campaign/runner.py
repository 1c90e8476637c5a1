"""Runs a campaign: pytest in a child process, with progress read from its evidence."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from verify.bundle import ROOT
from verify.campaign import halt, interruption
from verify.campaign.gpus.state import quarantined
from verify.campaign.progress import Progress, shown
from verify.cell.fork_server import CHILD, environment_of
from verify.evidence import Evidence, Reason, Verdicts, load, new_run_id
from verify.evidence.errors import read as errors_of
from verify.evidence.explanation import explain
from verify.evidence.judge_version import judge_changed
from verify.evidence.known_failures import handed_on, xfails_in
from verify.machine import device, starter
from verify.machine.places import state_directory

CLEAN, FAILED, USAGE, INFRASTRUCTURE = 0, 1, 2, 3
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # the disk accepts no data
_PYTEST_USAGE, _PYTEST_NOTHING = 4, 5  # exit codes of pytest
_POLL = 0.25  # seconds
_GRACE = 60.0  # seconds beyond a deadline for cases under way and the report
_LAST_CASES = 3.0  # seconds after SIGINT or SIGTERM for cases under way
_REAPED = 10.0  # seconds in which a process that was killed is gone
_REFUSED = re.compile(rf"\w*Error: (\[Errno (?:{'|'.join(map(str, NO_SPACE))})\] [^\n]*)")


class RunnerError(Exception):
    """A campaign cannot run.  The message is one line; `status` is the exit code."""

    def __init__(self, message: str, status: int = INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The user ended the campaign by SIGINT (Ctrl-C) or SIGTERM; verdicts so far are on record."""


class EndedAtOnce(KeyboardInterrupt):
    """The user sent a second signal, while cases under way were awaited."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The campaign that a command asks for.

    oracles: files with further ones.  workers: "auto", or a number; 0 runs in one process.
    exit_first: stop at the first failing verdict.  select: an expression for pytest -k.
    all_configs: judge the variants' further configs, too.  only_dtypes, only_oracles: judge these
    alone, by their names; () for all.  quiet: show no progress.  shard: "i/n", the i-th of n parts
    of its tests; "" for all.
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
    all_configs: bool = False
    only_dtypes: tuple[str, ...] = ()
    only_oracles: tuple[str, ...] = ()
    quiet: bool = False
    shard: str = ""

    @property
    def directory(self) -> Path:
        return state_directory() / "runs" / self.run_id

    def arguments(self) -> list[str]:
        """The arguments for pytest."""
        arguments = [
            str(ROOT / "tests" / "properties"),
            "--rootdir",
            str(ROOT),
        ]
        # pytest's default mode puts ROOT first in sys.path, where its folders would hide packages
        # of the same names.
        arguments += ["--import-mode", "importlib"]
        arguments += [
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
            "-p",
            "verify.campaign.chosen",
            "-q",
            "--no-header",
            "--tb=short",
        ]
        # One more process costs the verdict of one file more than it gains.
        whole = self.workers == "auto" and not self.kernels
        workers = device.workers_for_all() if whole else self.workers
        arguments += ["-n", workers, "--dist", "worksteal"] if workers != "0" else []
        arguments += ["--run-id", self.run_id]
        arguments += ["--profile", self.profile] if self.profile else []
        arguments += ["--all-configs"] if self.all_configs else []
        arguments += ["--examples", str(self.examples)] if self.examples is not None else []
        arguments += ["--hypothesis-seed", str(self.seed)] if self.seed is not None else []
        arguments += ["--report-dir", str(self.report_dir)] if self.report_dir is not None else []
        arguments += ["-k", self.select] if self.select else []
        arguments += ["--exitfirst"] if self.exit_first else []
        for kernel in self.kernels:
            arguments += ["--kernel", str(kernel)]
        for oracle in self.oracles:
            arguments += ["--oracle", str(oracle)]
        for name in self.only_dtypes:
            arguments += ["--only-dtype", name]
        for name in self.only_oracles:
            arguments += ["--only-oracle", name]
        arguments += ["--shard", self.shard] if self.shard else []
        return arguments


def say(console: Console, text: str) -> None:
    """Print an error in red, unwrapped, so that a command in it can be copied."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def execute(request: RunRequest, console: Console, deadline: float | None = None) -> int:
    """Run the campaign and return an exit code.

    deadline: in seconds of time.monotonic(); no case begins after it.  Raises RunnerError if the
    campaign cannot run, Interrupted if the user ended it, EndedAtOnce if the user asked twice.
    """
    try:
        request.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunnerError(_unwritable(request, str(error))) from None
    try:
        with interruptible():
            return _execute(request, console, deadline)
    except EndedAtOnce:
        raise
    except KeyboardInterrupt:
        raise Interrupted from None
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise RunnerError(_unwritable(request, str(error))) from None


def _execute(request: RunRequest, console: Console, deadline: float | None) -> int:
    """One session; and another one whenever a GPU is quarantined, on those that are left."""
    while True:
        before = quarantined(request.directory)
        code, output = _judged(request, console, deadline)
        after = quarantined(request.directory)
        new = sorted(after.keys() - before.keys())
        for gpu in new:
            say(console, f"{gpu} is quarantined: {after[gpu]}; what it judged does not count")
        left = [gpu for gpu in device.visible_gpus() if gpu not in after] if new else []
        if not left or (deadline is not None and time.monotonic() > deadline):
            return _status(code, request, output, console)
        say(console, f"run {request.run_id} goes on with {', '.join(left)}")


def _judged(request: RunRequest, console: Console, deadline: float | None) -> tuple[int, str]:
    """The exit code of one session, 0 if its time was over, and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        variables = os.environ | handed_on()
        if deadline is not None:
            variables[halt.UNTIL] = str(deadline)
        program = starter.Program(
            module="verify.campaign.session",
            arguments=request.arguments(),
            environment=variables,
            output=output.fileno(),
            session=True,
            leashed=True,
        )
        interruption.forget(request.directory)
        process = _session(program)
        over: Reason | None = "signal"
        try:
            over = "time" if _watch(process, request, console, deadline) else None
        except KeyboardInterrupt:
            _await_last_cases(process, request, console)
            raise
        finally:
            judging = interruption.under_way(request.directory) if over else []
            # The workers are in its process group; none may outlive it.  Cells end with a worker.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = _ended(process)
            if over:
                (request.directory / interruption.MARKER).touch()
                interruption.record(request.directory, judging, over)
        output.seek(0)
        return 0 if over else code, output.read()


def _await_last_cases(process: starter.Process, request: RunRequest, console: Console) -> None:
    """Let no further case begin, and give those under way a moment.  Raises EndedAtOnce at the next
    signal."""
    say(console, f"ending: cases under way have {_LAST_CASES:.0f} s; a second Ctrl-C ends at once")
    try:
        (request.directory / interruption.MARKER).touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_CASES)
    except KeyboardInterrupt:
        raise EndedAtOnce from None


def _session(program: starter.Program) -> starter.Process:
    """Start a campaign's session: a fork of what has imported most."""
    if starter.has(starter.JUDGES):
        return starter.launch(starter.JUDGES, program)
    if not starter.has(starter.CELLS):
        starter.start(starter.CELLS, CHILD, environment_of(()), session=True)
    return starter.launch_root(starter.CELLS, program)


def _ended(process: starter.Process, patience: float = _REAPED) -> int:
    """The exit code of a process that was killed.

    An exception that a signal raises between two instructions of `Popen.wait` can leave its lock
    taken for ever.  A wait without a time would then never return, so the process is reaped here.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(patience)
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    return -signal.SIGKILL


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM, which `timeout` and job schedulers send, as Ctrl-C, so that the workers end
    too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(
    process: starter.Process, request: RunRequest, console: Console, deadline: float | None
) -> bool:
    """Show the campaign's progress until it ends; returns whether its time was over before that."""
    progress = Progress(request.directory, deadline)
    with shown(console, request.quiet) as display:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
            display.show(progress)
            if deadline is not None and time.monotonic() > deadline + _GRACE:
                return True
    return False


def _status(returncode: int, request: RunRequest, output: str, console: Console) -> int:
    """The exit code of a campaign that has ended.  Raises RunnerError if pytest refused to run."""
    if returncode == _PYTEST_USAGE:
        raise RunnerError(_usage_error(output), USAGE)
    narrowing = {
        "--dtype": request.only_dtypes,
        "--oracle": request.only_oracles,
        "--shard": request.shard,
    }
    options = [name for name, given in narrowing.items() if given]
    if returncode == _PYTEST_NOTHING and (request.select or options):
        asked = [request.select, *request.only_dtypes, *request.only_oracles, request.shard]
        matched = " with ".join(repr(each) for each in asked if each)
        reasons = [f"nothing matches {matched}", _names(request), *_unloaded(request)]
        named = ["-k"] * bool(request.select) + options
        raise RunnerError(f"{', '.join(named)}: {'; '.join(reasons)}", USAGE)
    evidence = evidence_of(request)
    refused = _REFUSED.search(output) if returncode != CLEAN else None
    if refused is not None:
        if evidence is None or not evidence.verdicts or not failing(evidence):
            raise RunnerError(_unwritable(request, refused[1]))
        say(console, f"verify: {_unwritable(request, refused[1])}")
    if evidence is None or not evidence.verdicts:
        not_run = [] if evidence is None else _not_run(evidence)
        if not not_run or returncode != _PYTEST_NOTHING:
            console.print(output.strip()[-4000:], markup=False, highlight=False)
        for line in not_run:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print("nothing was judged", style="bold red")
        return INFRASTRUCTURE
    changed = judge_changed(evidence)
    if changed is not None:
        say(console, changed)
        return INFRASTRUCTURE
    if failing(evidence):
        return FAILED
    if returncode != CLEAN:
        if not errors_of(request.directory):  # recorded errors are shown elsewhere, one per line
            console.print(output.strip()[-4000:], markup=False, highlight=False)
        return INFRASTRUCTURE
    return CLEAN


def _not_run(evidence: Evidence) -> list[str]:
    """A line for each variant that was not run, with the reason and with what was compiled; and
    for each that could not be compiled."""
    compiled = Counter(built.variant for built in evidence.builds if built.resources)
    lines = {
        f"not run: {entry.variant}: {entry.reason}"
        + (f" (builds that compile: {count})" if (count := compiled[entry.variant]) else "")
        for entry in evidence.not_run
        if not entry.dtype
    }
    lines |= {
        f"not compiled: {entry.variant}: {entry.reason.strip()}"
        for entry in evidence.not_run
        if entry.dtype == "(builds)" and not compiled[entry.variant]
    }
    return sorted(lines)


def _usage_error(output: str) -> str:
    """pytest's message for a usage error, in one line."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return lines[0].removeprefix("ERROR: ") if lines else output.strip()[-500:]


def _names(request: RunRequest, most: int = 12) -> str:
    """A text with the names that target ids consist of, for a user whose -k matches nothing."""
    evidence = evidence_of(request)
    entries = () if evidence is None else evidence.variants
    dtypes = {str(dtype) for entry in entries for dtype in entry.support.get("dtypes", ())}
    configs = {config for entry in entries for config in entry.configs}
    names = [*(entry.ref for entry in entries), *sorted(dtypes), *sorted(configs)]
    shown = ", ".join(names[:most])
    return f"ids are made of {shown}" + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


def _unloaded(request: RunRequest) -> list[str]:
    """One line for each file that does not load: its variants are in no id."""
    evidence = evidence_of(request)
    verdicts = Verdicts() if evidence is None else evidence.verdicts
    loading = verdicts.where(lambda shape, said: shape.group == "loading")
    return [explain(verdict).splitlines()[0] for verdict in loading]


def _unwritable(request: RunRequest, reason: str) -> str:
    return f"cannot write evidence to {request.directory}: {reason}"


def failing(evidence: Evidence) -> bool:
    """Whether a verdict fails and no known defect explains it.  Raises XfailsError."""
    return bool(xfails_in(evidence).unexpected(evidence.verdicts))


def evidence_of(request: RunRequest) -> Evidence | None:
    """The run's evidence, or None if the run has not begun."""
    return load(request.directory) if request.directory.exists() else None
