"""Runs that are laid one behind the other: each as it would lie alone, and damage to one is its
own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.laid import laid as lay_alone
from tests.meta.cell.test_arena import PROBLEM, WORKSPACE
from verify.cell.arena import Arena, Plan, bits, plan
from verify.cell.arena_runs import Runs
from verify.problem import Layout
from verify.problem.inputs import tensors

POISONS = ("nan", "huge", "nan")
STEP = 4096
SHARED = PROBLEM.but(layout_q=Layout(expand="b"), layout_k=Layout(expand="h"))


def laid(problem: object = PROBLEM, begin: int = 2 * STEP) -> Runs:
    """Three cases of one shape."""
    cases = [PROBLEM.but(seed=n) if problem is PROBLEM else SHARED.but(seed=n) for n in range(3)]
    where = plan(cases[0], lse=True, workspace=WORKSPACE)
    step = -(-where.size // STEP) * STEP + STEP
    arena = Arena()
    arena.reserve(begin + len(cases) * step)
    runs = Runs(arena, where, begin, step, len(cases))
    runs.lay([tensors(case).named for case in cases], POISONS)
    return runs


def row(runs: Runs, run: int) -> np.ndarray:
    """The bytes of one run."""
    start = runs.begin + run * runs.step
    return runs.arena.bytes[start : start + runs.where.size]


def written(runs: Runs, run: int) -> None:
    """What a kernel would write: ones."""
    for slot in runs.where.of("output"):
        slot.view(torch.from_numpy(row(runs, run))).fill_(1)


@pytest.mark.parametrize("problem", [PROBLEM, SHARED], ids=["plain", "expanded"])
def test_each_run_lies_as_it_does_alone(problem: object) -> None:
    runs = laid(problem)
    for run, poison in enumerate(POISONS):
        alone = Arena()
        case = (PROBLEM if problem is PROBLEM else SHARED).but(seed=run)
        lay_alone(alone, runs.where, tensors(case).named, poison)
        assert np.array_equal(row(runs, run), alone.bytes[: runs.where.size])


def test_outputs_are_those_of_their_run_and_unwritten_ones_show() -> None:
    runs = laid()
    for run in range(3):
        written(runs, run)
    where: Plan = runs.where
    where["out"].view(torch.from_numpy(row(runs, 2)))[1, 0, 3, 2] = 7
    outputs, whole = runs.read()
    assert whole == [True] * 3
    for run, own in enumerate(outputs):
        assert own["out"].shape == PROBLEM.shape_out
        assert own["out"].is_contiguous()
        assert float(own["out"][1, 0, 3, 2]) == (7 if run == 2 else 1)
    assert runs.damages() == [None] * 3
    for run in (0, 1):
        runs = laid()
        for other in {0, 1, 2} - {run}:
            written(runs, other)
        assert runs.read()[1] == [other != run for other in range(3)]
    runs = laid()
    before = where["lse"].view(torch.from_numpy(row(runs, 1)))[0, 1, 2].clone()
    for run in range(3):
        written(runs, run)
    where["lse"].view(torch.from_numpy(row(runs, 1)))[0, 1, 2] = before
    outputs, whole = runs.read()
    assert whole == [True, False, True]
    assert bool((bits(outputs[1]["lse"]) == bits(before[None])).any())


@pytest.mark.parametrize("run", range(3))
def test_damage_is_that_of_its_run(run: int) -> None:
    runs = laid()
    for each in range(3):
        written(runs, each)
    slot = runs.where["k"]
    row(runs, run)[slot.start] ^= 0xFF
    row(runs, run)[runs.where.size - 1] ^= 0xFF
    found = runs.damages()
    assert [damage is None for damage in found] == [each != run for each in range(3)]
    damage = found[run]
    assert damage is not None
    assert (damage.slot, damage.count) == ("k", 2)


def test_bytes_between_two_runs_are_nobodys() -> None:
    runs = laid()
    runs.arena.bytes[runs.begin + runs.where.size] ^= 0xFF
    assert runs.damages() == [None] * 3
