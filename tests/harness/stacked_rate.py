"""Judged cases a second in one process, with and without siblings whose reference and bounds are
computed together: `python -m tests.harness.stacked_rate FILE DTYPE SIBLINGS SECONDS [PROCESSES]`.
With SIBLINGS such as "15x" the same cases are judged each alone.

CPU time is the judge's alone; the steps' milliseconds, which do not add up to it, are wall clock.
The judge is on the device that VERIFY_JUDGE_DEVICE names.  Every process judges drawn problems of
the first variant of FILE, each with its siblings, until SECONDS are over.  With one process, the
verdicts of its last group are compared with those of the same cases judged alone on the CPU.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from verify.campaign.judge import Judge
from verify.campaign.leases.hosts import visible_gpus
from verify.campaign.targets import Target
from verify.campaign.together import siblings
from verify.cell.discovery import roster
from verify.evidence import Recorder, Verdict
from verify.machine.settings import JUDGE_DEVICE, SIBLINGS
from verify.problem import Problem
from verify.problem.sampling import draws

_DRAWN = 400  # problems, at most
_COMPARED = 3  # groups
_CLOSE = 1e-6  # a measure is a quotient of fp64 numbers, or a percentile of them
# Of where the largest of equal elements is.
_PLACES = ("worst_", "max_error_", "error_bound_")


def main(path: Path, dtype: str, seconds: float, number: int, apart: bool) -> None:
    """number: which problems are drawn; one of another process is negative, and compares nothing.
    apart: each case is judged alone."""
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Recorder(Path(folder), "main"))
        try:
            declaration = roster([path], judge.fork_server).declarations[0]
            group = "gradients" if "backward" in declaration.entries else "accuracy"
            target = Target(declaration, declaration.configs[0], dtype, group)
            problems = draws(target.problems, _DRAWN, abs(number))
            list(judge.judge_together(target, problems[:1]))  # warm: the cell, the device
            _measure(judge, target, problems[1:], seconds, apart)
            if number > 0 and not apart:
                print(_apart(judge, target, problems[1:]))
        finally:
            judge.close()


def _measure(
    judge: Judge, target: Target, problems: list[Problem], seconds: float, apart: bool
) -> None:
    steps: Counter[str] = Counter()
    cases, failing, done = 0, 0, 0
    cell = judge.cells[target.declaration.path]
    asked, begun, spent = cell._requests, time.monotonic(), time.process_time()
    while time.monotonic() - begun < seconds and done < len(problems):
        group = [problems[done], *siblings(target, problems[done])]
        done += 1
        alone = (judge.judge(target, each) for each in group)
        for verdicts in alone if apart else judge.judge_together(target, group):
            cases += 1
            failing += any(v.finding is not None for v in verdicts)
            steps.update(verdicts[-1].seconds)
    wall, spent = time.monotonic() - begun, time.process_time() - spent
    told = ", ".join(f"{name} {1e3 * x / cases:.2f}" for name, x in steps.most_common())
    device, count = os.environ.get(JUDGE_DEVICE, "auto"), os.environ.get(SIBLINGS, "0")
    print(
        f"judge on {device}, {count} siblings{', each alone' * apart}: {cases} cases,"
        f" {done} shapes, {failing} failing, {cases / wall:.1f} cases/s,"
        f" {1e3 * spent / cases:.2f} ms of CPU a case,"
        f" {(cell._requests - asked) / cases:.3f} messages a case ({told})",
        flush=True,
    )


def _apart(judge: Judge, target: Target, problems: list[Problem]) -> str:
    """How the verdicts of some groups differ from those of each case alone, on the CPU."""
    count, far, other = 0, 0.0, 0
    asked = os.environ.get(JUDGE_DEVICE)
    groups = ([problem, *siblings(target, problem)] for problem in problems)
    for group in itertools.islice((each for each in groups if len(each) > 1), _COMPARED):
        together = list(judge.judge_together(target, group))
        os.environ[JUDGE_DEVICE] = "cpu"
        alone = [judge.judge(target, each) for each in group]
        os.environ.pop(JUDGE_DEVICE)
        if asked is not None:
            os.environ[JUDGE_DEVICE] = asked
        for mine, theirs in zip(together, alone, strict=True):
            count += 1
            asked_alone = {verdict.oracle: verdict for verdict in theirs}
            for a in mine:
                if a.outcome == "inapplicable":  # of those together, some are launched no other way
                    continue
                b = asked_alone[a.oracle]
                other += (a.case, a.outcome) != (b.case, b.outcome)
                other += a.measures.keys() != b.measures.keys()
                far = max(far, _farthest(a, b))
    return f"parity: {count} cases, {other} verdicts differ, measures by {far:.2g} at most"


def _farthest(a: Verdict, b: Verdict) -> float:
    """The largest relative difference of a measure."""
    far = 0.0
    for name in a.measures.keys() & b.measures.keys():
        mine, theirs = a.measures[name], b.measures[name]
        if mine != theirs and not name.startswith(_PLACES):
            off = abs(mine - theirs) / max(abs(mine), abs(theirs))
            far = max(far, off)
            if off > _CLOSE:
                print(f"  apart: {a.case} {a.oracle} {name}: {mine!r} {theirs!r}")
    return far


def together(arguments: list[str], processes: int) -> None:
    """Several of them at the same time, spread over the visible GPUs in turn."""
    command = [sys.executable, "-m", "tests.harness.stacked_rate", *arguments]
    gpus = visible_gpus() or [""]
    running = [
        subprocess.Popen(
            [*command, str(-n)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]},
        )
        for n in range(1, processes + 1)
    ]
    lines = [line for one in running for line in one.communicate()[0].splitlines()]
    rates = [float(line.split(" cases/s")[0].split()[-1]) for line in lines if "cases/s" in line]
    print(
        f"{processes} processes, {len(gpus)} GPUs: {sum(rates):.0f} cases/s; the first:"
        f" {lines[0] if lines else ''}"
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # of each judge
    given, last = sys.argv[1:5], int(sys.argv[5]) if len(sys.argv) > 5 else 1
    os.environ[SIBLINGS] = given[2].rstrip("x")
    if last > 1:
        together(given, last)
    else:
        main(Path(given[0]), given[1], float(given[3]), last, given[2].endswith("x"))
