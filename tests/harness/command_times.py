"""Figures of docs/performance.md: `python -m tests.harness.command_times ARGUMENTS` in a checkout.

It runs `verify ARGUMENTS`, which must take --run-id, and says when each stage of the command was
reached, what all of its processes cost, and where the time of its cases went.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from verify.cell.descendants import become_subreaper
from verify.evidence import new_run_id
from verify.evidence.strict_json import loads
from verify.machine.places import state_directory

_POLL = 0.01  # seconds


@dataclass(frozen=True)
class Figures:
    """stages: seconds of wall clock from the command's start, by stage, in the order of time.
    cpu: seconds of CPU time of the command and of all processes that it left.
    steps: seconds by step of a case, summed over all cases.  cases: their number."""

    stages: dict[str, float]
    cpu: float
    steps: dict[str, float]
    cases: int


def measure(arguments: list[str]) -> Figures:
    """Run `verify` with these arguments to its end, and read its evidence."""
    become_subreaper()
    run = new_run_id()
    directory = state_directory() / "runs" / run
    before = os.times()
    begun = time.time()
    command = [sys.executable, "-m", "verify", *arguments, "--run-id", run]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        found = directory / "roster.json"
        discovered = None
        while process.poll() is None:
            if discovered is None and found.exists():
                discovered = time.time()
            time.sleep(_POLL)
    ended = time.time()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass
    after = os.times()
    stages = {} if discovered is None else {"kernels loaded": discovered - begun}
    times, steps, cases = _recorded(directory)
    stages |= {stage: moment - begun for stage, moment in times.items()}
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Figures(stages | {"end": ended - begun}, cpu, steps, cases)


def _recorded(directory: Path) -> tuple[dict[str, float], dict[str, float], int]:
    """Times of the first records of each kind, seconds by step, and the number of cases."""
    first: dict[str, float] = {}
    spent: dict[str, dict[str, float]] = {}

    def seen(stage: str, moment: float) -> None:
        first[stage] = min(moment, first.get(stage, moment))

    for path in directory.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = loads(line)
            if record["kind"] == "begin":
                seen("first case begun", record["time"])
            elif record["kind"] == "verdict":
                seen("first verdict", record["time"])
                if record["outcome"] == "fail":
                    seen("first conviction", record["time"])
                spent[record["case"]] = record["seconds"]
    steps: Counter[str] = Counter()
    for seconds in spent.values():
        steps.update(seconds)
    return first, dict(steps), len(spent)


def main(arguments: list[str]) -> None:
    """Print the figures of one command."""
    found = measure(arguments)
    for stage, seconds in sorted(found.stages.items(), key=lambda pair: pair[1]):
        print(f"{seconds:8.2f} s  {stage}")
    print(f"{found.cpu:8.2f} s  of CPU time, all processes")
    print(f"{found.cases} cases, milliseconds of each:")
    for step, seconds in sorted(found.steps.items(), key=lambda pair: -pair[1]):
        print(f"{1e3 * seconds / max(found.cases, 1):8.2f} ms  {step}")


if __name__ == "__main__":
    main(sys.argv[1:])
