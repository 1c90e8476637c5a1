"""Planted kernels for the ways that a plain launch does not go: each is right there, and convicted
by the oracle that goes that way.

Misaligned tensors need no GPU.  A graph, streams and a second device do: without them these tests
are listed as skipped, and test_oracles_ways.py has stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.fake_trials import acquitted
from tests.harness.property_cases import Bench, bench
from verify.bundle import ROOT
from verify.cell.arena import Arena
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CUDA, Cell, ForkServer
from verify.cell.ways import GONE, OTHER_DEVICE
from verify.judging.findings import Ruling
from verify.judging.run_checks import execution, memory
from verify.judging.trial import Trial
from verify.oracles import of_group
from verify.problem import Layout, Problem

torch.set_num_threads(1)

ALIGNED = Problem(seqlen_q=9, seqlen_kv=17, head_dim=16, dtype="float32", seed=3)
MISALIGNED = ALIGNED.but(layout_k=Layout("bshd", 0, 1))  # K starts 4 bytes after an aligned address


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("other_ways.py", tmp_path_factory.mktemp("ways")) as opened:
        yield opened


@pytest.mark.parametrize("fault", ["rounds", "traps"])
def test_a_kernel_that_needs_aligned_tensors_and_does_not_say_so_is_convicted(
    fault: str, kernels: Bench
) -> None:
    oracle = {"rounds": "bound", "traps": "execution"}[fault]
    for problem in (ALIGNED, MISALIGNED):
        verdict = kernels.verdict("right", "accuracy", oracle, problem)
        assert verdict.outcome == "pass", verdict.finding
    assert kernels.verdict(fault, "accuracy", oracle, ALIGNED).outcome == "pass"
    assert kernels.verdict(fault, "accuracy", oracle, MISALIGNED).outcome == "fail"


# On a GPU.

SAMPLES = ROOT / "tests" / "sample_kernels" / "other_ways.py"
DEVICES = ROOT / "tests" / "planted" / "devices.py"
# Large enough that launches overlap; of the eighth that each oracle judges.
ON_GPU = Problem(heads_q=2, heads_kv=2, seqlen_q=40, seqlen_kv=70, head_dim=32, dtype="float32")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def rulings(file: Path, oracle: str, problem: Problem) -> dict[str, Ruling]:
    """An oracle's rulings on every variant of a file, which pass the checks of a plain run."""
    fork_server, arena, found = ForkServer(PLAIN_CUDA), Arena(), {}
    (judge,) = (each for each in of_group("accuracy") if each.name == oracle)
    try:
        for declaration in roster([file]).declarations:
            cell = Cell(fork_server)
            trial = Trial(declaration, declaration.configs[0], problem, cell, arena, cell.arch())
            for check in (execution, memory):
                ruling = check(trial, trial.first)
                assert acquitted(ruling), ruling.finding
            assert judge.excludes(declaration) is None
            found[declaration.name] = judge.judge(trial)
            if oracle == OTHER_DEVICE.replace(" ", "_"):
                assert trial.going(OTHER_DEVICE).reply.data.get(GONE) is not False
            cell.close()
    finally:
        arena.close()
        fork_server.close()
    return found


@cuda
@pytest.mark.parametrize(
    ("oracle", "convicted"),
    [
        ("shared_inputs", {"restores"}),
        ("graph", {"keeps"}),
        ("repeat", set()),  # no fault shows in plain launches
    ],
)
def test_one_oracle_convicts_each_kernel_on_a_gpu(oracle: str, convicted: set[str]) -> None:
    found = rulings(SAMPLES, oracle, ON_GPU)
    assert {name for name, ruling in found.items() if not acquitted(ruling)} == convicted
    if oracle == "graph":
        assert all(ruling.measures["graph_captured"] == 1.0 for ruling in found.values())


@cuda
@two
def test_a_kernel_on_whatever_device_is_current_is_convicted() -> None:
    problem = Problem(seqlen_q=65, seqlen_kv=65, head_dim=40, dtype="float32")
    found = rulings(DEVICES, "other_device", problem)
    assert acquitted(found["guarded"]), found["guarded"].finding
    assert found["guarded"].measures == {"other_device": 1.0}
    assert not acquitted(found["unguarded"])


@cuda
@two
@pytest.mark.parametrize(
    "file",
    [
        "ptx/split_q.py",
        "cute/flash_forward.py",
        "triton/flash_forward.py",
        "gluon/hopper_forward.py",
    ],
)
def test_a_shipped_kernel_is_launched_where_its_tensors_are(file: str) -> None:
    problem = Problem(seqlen_q=65, seqlen_kv=65, head_dim=64, dtype="float16")
    found = rulings(ROOT / "kernels" / file, "other_device", problem)
    assert found
    for name, ruling in found.items():
        assert acquitted(ruling), (name, ruling.finding)
        assert ruling.measures == {"other_device": 1.0}
