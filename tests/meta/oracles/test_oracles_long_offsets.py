"""Long offsets: strides that reach past a limit, and rows that are read or written where a narrower
offset would have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from tests.harness.fake_trials import right_run, trial_of
from verify.cell.arena import Arena, plan
from verify.cell.process import Cell
from verify.judging.trial import Trial
from verify.oracles.long import long_offsets
from verify.problem import Problem

torch.set_num_threads(1)

PROBLEM = Problem(
    heads_q=4,
    heads_kv=2,
    seqlen_q=3000,
    seqlen_kv=130,
    head_dim=32,
    dtype="float16",
    distribution="gather",
)


class Released:
    """An arena and a cell of which nothing is wanted but to let go."""

    def __init__(self) -> None:
        self.times = 0

    def close(self) -> None:
        self.times += 1

    def restart(self) -> None:
        self.times += 1


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_the_last_row_lies_far(name: str) -> None:
    """By the stride of rows alone, and by it alone; the whole is not twice as large as it must
    be."""
    problem = long_offsets.far(PROBLEM, name)
    shape, layout = problem.shapes[name], problem.layouts[name]
    assert (shape[2] - 1) * layout.strides(shape)[2] > long_offsets.REACH
    assert layout.aligned(shape, 1, 64)
    size = plan(problem, lse=True, workspace={}).size
    assert long_offsets.REACH * 2 < size < long_offsets.REACH * 2.2
    assert problem.seqlen_q == 130
    assert Problem.parse(problem.name) == problem


def tried(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[str, Tensor], None] = lambda name, out: None
) -> tuple[Trial, Released]:
    monkeypatch.setattr(long_offsets, "REACH", 1 << 20)
    trial, released = trial_of(PROBLEM), Released()
    trial.arena, trial.cell = cast(Arena, released), cast(Cell, released)
    for name in ("k", "out"):
        other = trial.beside(f"far {name}", long_offsets.far(PROBLEM, name))
        other.launches["first"] = right_run(other)
        out = other.first.out
        assert out is not None
        plant(name, out)
    return trial, released


def test_right_rows_pass_and_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, released = tried(monkeypatch)
    ruling = long_offsets.judge(trial)
    assert ruling.finding is None
    assert ruling.observed == {"far_k": "right", "far_out": "right"}
    assert released.times == 4


@pytest.mark.parametrize("where", ["k", "out"])
def test_rows_that_wrap_are_convicted(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The second half of the rows holds what the first half does."""

    def plant(name: str, out: Tensor) -> None:
        if name == where:
            out[:, :, 65:] = out[:, :, :65].clone()

    trial, _ = tried(monkeypatch, plant)
    finding = long_offsets.judge(trial).finding
    assert finding is not None
    assert finding.oracle == "long_offsets"
    assert finding.message.startswith(
        f"the last row of {where} lies 1048576 elements from the first"
    )


def test_without_memory_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, released = tried(monkeypatch)
    monkeypatch.setattr(long_offsets, "_room", lambda size: False)
    ruling = long_offsets.judge(trial)
    assert ruling.finding is None
    assert set(ruling.observed.values()) == {"not asked: too little memory is free"}
    assert released.times == 0


@pytest.mark.parametrize(("most", "held"), [(1, 1), (2, 2), (9, 3)])
def test_turns_are_taken_as_far_as_memory_reaches(
    most: int, held: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second and third take only what the ones before them leave; the rest wait for the
    first."""
    monkeypatch.setattr(long_offsets.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(long_offsets, "_room", lambda size: size <= most * 100)
    acquire, waits = FileLock.acquire, []

    def asked(self: FileLock, timeout: float | None = None, **more: object) -> object:
        waits.append(timeout)
        return acquire(self, timeout=0)

    with contextlib.ExitStack() as stack:
        for _ in range(held):
            stack.enter_context(long_offsets._turn(100))
        monkeypatch.setattr(FileLock, "acquire", asked)
        with pytest.raises(Timeout), long_offsets._turn(100):
            raise AssertionError("one turn too many")
        assert waits == [0] * held + [None]
    waits.clear()
    with long_offsets._turn(100):  # all were given back
        assert waits == [0]
