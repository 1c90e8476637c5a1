"""The trials for speed without a GPU: every edit still matches its text, launches are made, and a
trial that ends its process costs itself alone."""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cute import flash_forward, hopper_fp8_forward
from tests.harness import speed_edits, speed_gluon, speed_rounds, speed_trials
from tests.harness.gluon_host import Host, convicted_by_bound
from tests.harness.speed_trials import GROUPS, Inputs, Trial
from verify.cuda.compile import compilable
from verify.problem import Problem

FORWARD = (
    speed_edits.rescale(lazy=True),
    speed_edits.NO_EXPONENTIALS,
    speed_edits.QUERIES_STAY,
    speed_edits.blocks_of_a_multiprocessor(2),
)
EIGHT_BITS = (
    speed_edits.LAZY_RESCALE,
    speed_edits.NO_EXPONENTIALS_8,
    speed_edits.NO_TRANSPOSITION,
    speed_edits.NO_CONVERSION,
    speed_edits.polynomial_exponentials(4),
)


@pytest.mark.skipif(
    flash_forward.compilable() is not None, reason=f"{flash_forward.compilable() or compilable()}"
)
def test_edits_match_the_shipped_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    for shipped, edits in (
        (flash_forward.VARIANT, FORWARD),
        (hopper_fp8_forward.PROMOTED, EIGHT_BITS),
    ):
        config = shipped.configs[0]
        choice = speed_edits.choice_of(config, shipped.support.dtypes[0], 64)
        plain = speed_edits.family_of(shipped, config).make(*choice).source
        made = {speed_edits.family_of(shipped, config, one).make(*choice).source for one in edits}
        assert plain not in made
        assert len(made) == len(edits)


@pytest.mark.parametrize("group", ["triton", "triton-fp8", "gluon", "gluon-fp8"])
def test_launches_of_triton_are_made(group: str) -> None:
    trials = list(GROUPS[group][0]())
    assert len({trial.label for trial in trials}) == len(trials)
    for causal in (False, True):
        inputs = Inputs(64, seqlen=64, causal=causal, device="cpu")
        for trial in trials:
            assert callable(trial.make(inputs)), trial.label


@pytest.mark.parametrize("label", speed_gluon.EDITS)
@pytest.mark.parametrize(
    "text", ["sq=64,skv=200,d=64,mask=causal", "sq=70,skv=131,d=128", "sq=9,skv=40,d=16,scale=0.7"]
)
def test_an_edit_of_the_gluon_forward_computes_the_same(label: str, text: str) -> None:
    """Inside the bounds of what the kernel declares, as Python runs the text."""
    problem = Problem.parse(f"{text},dtype=float8_e4m3fn,lv=transposedv")
    host = Host(*speed_gluon.EDITS[label], kernel="hopper_fp8_forward")
    shipped = speed_gluon.COPIES.shipped
    assert convicted_by_bound(host, shipped, problem, shipped.configs[2]) is None


def _right(inputs: Inputs) -> Any:
    return lambda: inputs.out.fill_(0.0)


def _raises(inputs: Inputs) -> Any:
    raise RuntimeError("out of resources\nin two lines")


def _ends(inputs: Inputs) -> Any:
    os._exit(3)


def _planted() -> Any:
    yield Trial("right", _right)
    yield Trial("raises", _raises)
    yield Trial("ends", _ends)


def test_a_trial_that_raises_says_so_and_has_no_call() -> None:
    inputs = Inputs(64, seqlen=16, device="cpu")
    call, error = speed_rounds.first_call(_raises, inputs)
    assert call is None
    assert "RuntimeError" in error
    assert "out of resources" in error
    call, error = speed_rounds.first_call(_right, inputs)
    assert call is not None
    assert not error


def test_a_trial_that_ends_its_process_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed_trials.GROUPS, "planted", (_planted, (64,)))
    calls: list[tuple[str, int, int]] = []

    class Pool:
        """In this process; a trial that would end it is one that breaks the pool."""

        def __init__(self, workers: int, mp_context: object) -> None:
            assert workers == 1

        def submit(self, work: object, one: tuple[str, int, int]) -> Any:
            calls.append(one)
            future: Any = Future()
            if one[1] == 2:
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(None)
            return future

        def shutdown(self) -> None: ...

    monkeypatch.setattr(speed_rounds, "ProcessPoolExecutor", Pool)
    assert speed_rounds.crashing(["planted"], 2) == {("planted", 2, 64)}
    assert sorted(calls) == [("planted", number, 64) for number in range(3)]


def test_distance_is_relative() -> None:
    wanted = torch.full((4, 4), 2.0)
    assert speed_rounds.distance(wanted, wanted) == 0
    assert speed_rounds.distance(wanted * 1.5, wanted) == pytest.approx(0.5)


def test_the_table_has_the_fastest_first() -> None:
    rows = {
        "slow": {"ms": 2.0, "distance": 1e-3},
        "fast": {"ms": 1.0, "distance": 1e-3},
        "cut": {"ms": 0.5, "distance": 9.0, "wrong": True},
        "broken": {"error": "OutOfResources"},
    }
    lines = speed_rounds.table("triton", 128, "full", rows).splitlines()[4:]
    assert [line.split("|")[1].strip() for line in lines] == ["cut", "fast", "slow", "broken"]
    assert "ablation" in lines[0]
    assert "| 1100 |" in lines[1]  # 4 * 32 * 8192^2 * 128 operations in a millisecond
    half = speed_rounds.table("triton", 128, "causal", rows).splitlines()[4:]
    assert "| 550 |" in half[1]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert speed_rounds.main([]) == 2
    assert speed_rounds.main([str(tmp_path / "a.json"), "banana"]) == 2
    if not torch.cuda.is_available():
        assert speed_rounds.main([str(tmp_path / "a.json")]) == 3
        assert "needs a GPU" in capsys.readouterr().err
