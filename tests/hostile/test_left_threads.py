"""A thread that one kernel leaves cannot write where another kernel has its inputs and results.

The thread waits until a launch of the other kernel has written its results, and then writes others
over its own buffers.  So that does not depend on time, the other kernel asks for it, and returns
when it is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.test_hostile import KERNELS, PROBLEM
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell import confinement
from verify.cell.discovery import roster
from verify.evidence import Recorder, Verdict
from verify.variant import Declaration

SHAPE = (1, PROBLEM.heads_q, PROBLEM.seqlen_q, PROBLEM.head_dim)
ASKED = 20.0  # seconds within which the thread must have answered
LEAVES = """
import os, threading, time
from pathlib import Path
from hostile_base import declare, right, wrong

held = []

def forward(args, out, lse, workspace):
    right(args, out, lse)
    if out.shape == {shape} and not held:
        held.append((args, out, lse))
        threading.Thread(target=writes, daemon=True).start()

def writes():
    while True:
        for asked in Path({folder!r}).glob("*.asked"):
            {writes}(*held[0])
            asked.rename(asked.with_suffix(".done"))
        time.sleep(0.001)

VARIANT = declare("leaves", forward)
"""
ASKS = """
import itertools, time
from pathlib import Path
from hostile_base import declare, right, wrong

numbers = itertools.count()

def forward(args, out, lse, workspace):
    {writes}(args, out, lse)
    if out.shape != {shape}:
        return
    done = Path({folder!r}, f"{{next(numbers)}}.done")
    done.with_suffix(".asked").touch()
    until = time.monotonic() + {seconds}
    while not done.exists():
        if time.monotonic() > until:
            raise RuntimeError("no thread answers")
        time.sleep(0.001)
    done.unlink()

VARIANT = declare("asks", forward)
"""


@pytest.fixture
def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], dict[str, list[Verdict]]]:
    """The failing verdicts on a kernel that leaves a thread and on one that asks it to write, by
    name; each argument is a function of `hostile_base`: what the thread writes, and what the other
    kernel has written.  Both are judged twice, in turn, in processes that live on."""
    folder = tmp_path / "asked"
    folder.mkdir()
    shutil.copy(KERNELS / "hostile_base.py", tmp_path)
    if confinement.enabled():
        monkeypatch.setenv("VERIFY_WRITABLE", str(folder))

    def judge(thread: str, other: str) -> dict[str, list[Verdict]]:
        paths = []
        for name, text, writes in (("leaves", LEAVES, thread), ("asks", ASKS, other)):
            paths.append(tmp_path / f"{name}.py")
            said = {"shape": SHAPE, "folder": str(folder), "seconds": ASKED, "writes": writes}
            paths[-1].write_text(text.format(**said), encoding="utf-8")
        judge = Judge(Recorder(tmp_path / "record", "main"))
        try:
            kernels = roster(paths, judge.fork_server).declarations
            found: dict[str, list[Verdict]] = {each.name: [] for each in kernels}
            processes = set()
            for seed in range(2):
                for each in kernels:
                    target = Target(each, each.configs[0], "float32", "accuracy")
                    verdicts = judge.judge(target, PROBLEM.but(seed=seed))
                    found[each.name] += [v for v in verdicts if v.outcome == "fail"]
                    processes.add(process(judge, each))
            assert len(processes) == 2, "a process ended, and its thread with it"
        finally:
            judge.close()
        assert not list(folder.iterdir()), "a launch asked, and was not answered"
        return found

    return judge


def process(judge: Judge, kernel: Declaration) -> tuple[str, int]:
    """The present process of a kernel."""
    return kernel.name, judge.cells[kernel.path].process_number


def test_a_wrong_kernel_is_not_acquitted_for_a_thread_of_another(
    judged: Callable[[str, str], dict[str, list[Verdict]]],
) -> None:
    found = judged("right", "wrong")
    assert [verdict.oracle for verdict in found["asks"]].count("bound") == 2
    assert not found["leaves"]


def test_a_right_kernel_is_not_convicted_for_a_thread_of_another(
    judged: Callable[[str, str], dict[str, list[Verdict]]],
) -> None:
    found = judged("wrong", "right")
    assert not found["asks"], found["asks"][0].finding
    assert not found["leaves"], found["leaves"][0].finding
