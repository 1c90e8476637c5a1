"""Figures of docs/performance.md: `python -m tests.harness.command_times ARGUMENTS` in a checkout.

It runs `verify ARGUMENTS`, a command that takes --run-id, and prints when its stages were reached:
seconds of wall clock, and of CPU time of all its processes up to then.  Below that, what each step
of its cases took, and where the time of its workers went (`tests.harness.worker_times`).  Linux
only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import worker_times
from verify.campaign.runner import interruptible
from verify.cell.descendants import become_subreaper, children
from verify.evidence import new_run_id
from verify.evidence.records import OF_VERDICTS
from verify.evidence.strict_json import loads
from verify.machine.places import state_directory

_POLL = 0.02  # seconds, and more where the command has run for long: it reads the whole evidence
_PATIENCE = 3.0  # seconds for a command that is told to end
_TICK = 1 / os.sysconf("SC_CLK_TCK")
LOADED, BEGUN, JUDGED = "kernels loaded", "first case begun", "first verdict"
CONVICTED, END = "first conviction", "end"


@dataclass
class Watch:
    """A command while it runs, and what was seen of it.

    stages: (seconds of wall clock, seconds of CPU time) since the start, by stage.
    """

    directory: Path
    begun: float = field(default_factory=time.monotonic)
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)

    def look(self) -> None:
        """Note the stages that the command has reached since the last look."""
        reached = set(self._reached()) - set(self.stages)
        if reached:
            self._note(*reached)

    def end(self) -> None:
        """Note the end, when all processes have ended and none is waited for yet."""
        self._note(END)

    def _note(self, *stages: str) -> None:
        now = time.monotonic() - self.begun, used(os.getpid())
        self.stages |= dict.fromkeys(stages, now)

    def _reached(self) -> Iterator[str]:
        if (self.directory / "roster.json").exists():
            yield LOADED
        if CONVICTED in self.stages:
            return
        for path in self.directory.glob("*.jsonl"):
            text = path.read_bytes()
            yield from (BEGUN,) * (b'"kind":"begin"' in text)
            yield from (JUDGED,) * any(f'"kind":"{kind}"'.encode() in text for kind in OF_VERDICTS)
            yield from (CONVICTED,) * (b'"outcome":"fail"' in text)


def used(pid: int) -> float:
    """Seconds of CPU time of a process's descendants, those that it has not waited for included."""
    ticks = 0
    for child in children(pid):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{child}/stat").read_text(encoding="ascii")
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
        ticks += round(used(child) / _TICK)
    return ticks * _TICK


@dataclass(frozen=True)
class Cases:
    """The cases of a run: how many, the seconds of each step of all of them, and when each had its
    last verdict, in seconds since the epoch."""

    count: int
    steps: dict[str, float]
    ends: list[float]

    @property
    def rate(self) -> float:
        """Cases a second in the second half of the time from the first verdict to the last: without
        the start."""
        begun, end = min(self.ends, default=0.0), max(self.ends, default=0.0)
        middle = (begun + end) / 2
        return sum(each > middle for each in self.ends) / max(end - middle, 1e-9)


def measure(arguments: list[str], folder: Path) -> tuple[dict[str, tuple[float, float]], Cases]:
    """Run `verify` with these arguments; returns the stages, and the cases.

    folder: where the workers write where their time went.
    """
    become_subreaper()
    run = new_run_id()
    watch = Watch(state_directory() / "runs" / run)
    command = [sys.executable, "-m", "verify", *arguments, "--run-id", run]
    plugin = {"PYTEST_PLUGINS": worker_times.__name__, worker_times.FOLDER: str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | plugin)
    try:
        with interruptible():
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                watch.look()
                time.sleep(max(_POLL, (time.monotonic() - watch.begun) / 200))
    except KeyboardInterrupt:  # what there is until now is shown
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        process.kill()
    watch.look()
    watch.end()
    process.wait()
    return watch.stages, cases_of(watch.directory)


def cases_of(directory: Path) -> Cases:
    """The cases of a run."""
    spent: dict[str, dict[str, float]] = {}
    ends: dict[str, float] = {}
    for path in directory.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = loads(line)
            if record["kind"] in OF_VERDICTS:
                spent[record["case"]] = record["seconds"]
                ends[record["case"]] = record["time"]
    steps: Counter[str] = Counter()
    for seconds in spent.values():
        steps.update(seconds)
    return Cases(len(spent), dict(steps), list(ends.values()))


def main(arguments: list[str]) -> None:
    """Print the figures of one command."""
    with tempfile.TemporaryDirectory() as folder:
        stages, cases = measure(arguments, Path(folder))
        times = worker_times.table(Path(folder), cases.count)
    print("   wall s    CPU s")
    for stage, (wall, cpu) in stages.items():
        print(f"{wall:9.2f}{cpu:9.2f}  {stage}")
    print(
        f"{cases.count} cases, {cases.rate:.1f} a second in the second half; milliseconds of each:"
    )
    for step, seconds in sorted(cases.steps.items(), key=lambda pair: -pair[1]):
        print(f"{1e3 * seconds / max(cases.count, 1):9.2f}  {step}")
    print(times)


if __name__ == "__main__":
    main(sys.argv[1:])
