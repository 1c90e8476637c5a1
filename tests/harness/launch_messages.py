"""Messages and time of judged cases, by group: `python -m tests.harness.launch_messages SECONDS
RECORDS FILE...` judges drawn problems of every group, variant and dtype of these kernel files.

RECORDS gets the verdicts without what differs from run to run, so that the records of two versions
of the judge can be compared.  SECONDS: after which no further case begins, drawing included; 0 for
all the time.  LAUNCHES_ALONE=1 gives every launch a message of its own.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from verify.campaign.edge_cases import drawn
from verify.campaign.judge import Judge
from verify.campaign.targets import Target, excludes_group, excludes_here
from verify.cell.discovery import roster
from verify.cell.process import Cell
from verify.evidence import Recorder, Verdict
from verify.oracles import groups
from verify.problem import Problem

_EACH = 2  # problems of a target
_RANDOM = ("seconds", "time")  # fields that differ from run to run


def targets(judge: Judge, paths: list[Path]) -> Iterator[Target]:
    """Every target of these files that this machine can judge."""
    for declaration in roster(paths, judge.fork_server).declarations:
        if excludes_here(declaration) is not None:
            continue
        for group in groups():
            if excludes_group(declaration, group) is None:
                for dtype in declaration.support.dtypes[:1]:
                    yield Target(declaration, declaration.configs[0], dtype, group)


def problems(judge: Judge, paths: list[Path]) -> Iterator[tuple[Target, Problem]]:
    """What is judged, drawn when it is asked for."""
    for target in targets(judge, paths):
        for problem in target.asked[:_EACH] or drawn(target, _EACH, 0):
            yield target, problem


def record(verdict: Verdict) -> str:
    """A verdict without what differs from run to run."""
    data = msgspec.to_builtins(verdict)
    return msgspec.json.encode(
        {k: v for k, v in data.items() if k not in _RANDOM}, order="sorted"
    ).decode()


def main(seconds: float, records: Path, paths: list[Path]) -> None:
    messages: Counter[str] = Counter()
    asked = Cell._ask

    def counted(cell: Cell, message: dict[str, Any], *rest: Any, **more: Any) -> Any:
        messages[message["op"]] += 1
        return asked(cell, message, *rest, **more)

    vars_of: Any = Cell
    vars_of._ask = counted
    if os.environ.get("LAUNCHES_ALONE") == "1":
        vars_of.runs_several = lambda cell, variant: False
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Recorder(Path(folder), "main"))
        try:
            until = time.monotonic() + seconds if seconds else float("inf")
            for target, problem in problems(judge, paths):
                if time.monotonic() > until:
                    break
                before = sum(messages.values())
                wall, cpu = time.monotonic(), time.process_time()
                verdicts = judge.judge(target, problem)
                lines += map(record, verdicts)
                row = rows[target.group]
                row[0] += 1
                row[1] += sum(messages.values()) - before
                row[2] += time.monotonic() - wall
                row[3] += time.process_time() - cpu
        finally:
            judge.close()
    records.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _print(rows, messages)


def _print(rows: dict[str, list[float]], messages: Counter[str]) -> None:
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"{'group':28} {'cases':>5} {'messages':>8} {'ms a case':>10} {'judge CPU ms':>12}")
    for group, (cases, asked, wall, cpu) in rows.items():
        each = f"{asked / cases:8.2f} {1e3 * wall / cases:10.1f} {1e3 * cpu / cases:12.1f}"
        print(f"{group:28} {cases:5.0f} {each}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{dict(messages)}; children {used.ru_utime + used.ru_stime:.1f} s of CPU time; {where}")


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
