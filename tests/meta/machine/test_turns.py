"""Turns on a shared GPU: side by side, or alone; a process that waits to be alone is not
overtaken."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from verify.machine.settings import LAUNCHERS
from verify.machine.turns import Turns

OTHER = """
import sys
from verify.machine.turns import GPU
with getattr(GPU, sys.argv[1])():
    print("in", flush=True)
    sys.stdin.readline()
"""


class Other:
    """Another process that takes a turn, and keeps it until it is told to end."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def enters(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "in\n"

    def waits(self) -> bool:
        """Whether it has not entered within the time that an entry takes many times."""
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], 0.3)[0]

    def leaves(self) -> None:
        self.process.communicate("\n", timeout=60)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_who_waits_to_be_alone_waits_for_all_and_is_passed_by_none() -> None:
    turns = Turns()
    with turns.shared():
        beside = Other("shared")
        beside.enters()
        alone = Other("alone")
        assert alone.waits()
        late = Other("shared")
        beside.leaves()
        assert alone.waits()
    alone.enters()
    assert late.waits()
    alone.leaves()
    late.enters()
    late.leaves()


def test_a_turn_ends_with_its_process() -> None:
    killed = Other("alone")
    killed.enters()
    killed.process.kill()
    killed.process.communicate()
    with Turns().shared():
        pass


def test_turns_nest_but_nobody_waits_for_himself() -> None:
    turns = Turns()
    with turns.alone(), turns.shared():
        pass
    with (
        turns.shared(),
        turns.shared(),
        pytest.raises(RuntimeError, match="within another"),
        turns.alone(),
    ):
        pass
    with turns.alone():
        pass


def test_few_launch_at_the_same_time_and_one_that_takes_long_makes_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAUNCHERS, "2")
    turns = Turns()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    with turns.launching(), turns.launching():  # no process waits for itself
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw4")
        beside = Other("launching")
        beside.enters()
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw5")
        late = Other("launching")
        assert late.waits()
        references = Other("shared")
        references.enters()
        turns.make_way()
        late.enters()
        late.leaves()
        beside.leaves()
        references.leaves()
    killed = Other("launching")
    killed.enters()
    killed.process.kill()
    killed.process.communicate()
    with turns.launching():
        alone = Other("alone")
        assert alone.waits()
    alone.enters()
    alone.leaves()


def test_all_launch_at_the_same_time_if_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHERS, raising=False)
    with Turns().launching():
        beside = Other("launching")
        beside.enters()
        beside.leaves()
