"""Which GPUs a session uses and how many workers, and that all of a worker's processes see them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verify.campaign.gpus import placement, state
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, ForkServer
from verify.machine import device

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
MASK = "CUDA_VISIBLE_DEVICES"

SEES = '''
"""Its variant is called by the GPUs that its process sees."""
import os

from verify.variant import Support, Variant


def forward(args, out, lse, workspace):
    """Never called."""


VARIANT = Variant(
    name=os.environ["CUDA_VISIBLE_DEVICES"].replace(",", "-"),
    family="sees",
    forward=forward,
    support=Support(dtypes=("float32",), head_dims=(40,), masks=("full",)),
)
'''


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """A function that gives this machine GPUs of models, with free memory in GiB."""

    def put(models: Iterable[str], free: Iterable[int] = (80, 80, 80)) -> None:
        named = list(zip((A, B, C), models, strict=False))
        rows = [[str(n), u, m, "9.0", "580"] for n, (u, m) in enumerate(named)]
        monkeypatch.setattr(device, "_known", rows)
        said = {row[1]: gib << 30 for row, gib in zip(rows, free, strict=False)}
        monkeypatch.setattr(device, "free_memory", lambda: said)
        monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: True)
        monkeypatch.setenv(MASK, "")
        monkeypatch.delenv(MASK)

    return put


@pytest.mark.parametrize(
    ("rooms", "most", "workers"),
    [
        ([26], 16, 16),
        ([26], 64, 26),
        ([8, 8], 64, 16),
        ([8, 7], 64, 15),
        ([7, 8], 64, 14),  # the first one gets the fifteenth
        ([8, 0], 64, 1),
        ([0, 8], 64, 0),
        ([26, 26, 26, 26], 64, 64),
    ],
)
def test_no_gpu_gets_more_workers_than_it_has_room_for(
    rooms: list[int], most: int, workers: int
) -> None:
    assert placement.dealt(rooms, most) == workers
    for number, room in enumerate(rooms):
        assert len(range(number, workers, len(rooms))) <= room


@pytest.mark.parametrize(
    ("rooms", "chosen"),
    [
        ({A: 26, B: 26}, ([A, B], 32)),
        ({A: 26, B: 1}, ([A], 26)),
        ({A: 0, B: 26, C: 26}, ([B, C], 32)),
        ({A: 20, B: 16}, ([A, B], 32)),
        ({A: 0, B: 0}, ([A, B], 1)),
    ],
)
def test_gpus_that_others_use_are_left_out(
    rooms: dict[str, int], chosen: tuple[list[str], int]
) -> None:
    assert placement.roomy(rooms, 32) == chosen


def test_a_session_is_placed_without_a_context_on_a_gpu(
    gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "cores", lambda: 8)
    gpus(("H100",) * 3, (1, 12, 80))
    assert placement.place_workers() == 8
    assert os.environ[MASK] == f"{B},{C}"
    gpus(("H100",) * 3)
    assert placement.place_workers() == 8
    assert MASK not in os.environ


def test_without_known_memory_cuda_is_asked(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(("H100", "H100"), ())
    monkeypatch.setattr(placement, "cores", lambda: 64)
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        placement.torch.cuda, "mem_get_info", lambda number: ((30 << 30) - number, 0)
    )
    assert placement.place_workers() == 19


def test_a_quarantined_gpu_is_hidden_and_so_are_other_models(gpus, tmp_path: Path) -> None:
    run = tmp_path / "run"
    gpus(("H100", "H100", "H100"))
    placement.leave_out(run)
    assert MASK not in os.environ
    run.mkdir()
    state.write(run, {B: state.Gpu(quarantined="wrong"), C: state.Gpu(controls=2)})
    (run / f"{state.recorder_name('gw1', B)}.jsonl").write_text("evidence\n")
    placement.leave_out(run)
    assert os.environ[MASK] == f"{A},{C}"
    assert not state.files_of(run, B)
    assert [path.read_text() for path in state.files_of(run, B, out=True)] == ["evidence\n"]

    state.write(run, {each: state.Gpu(quarantined="wrong") for each in (A, C)})
    with pytest.raises(placement.NoGpuError, match="has quarantined every visible GPU"):
        placement.leave_out(run)


def test_evidence_bears_one_models_name(
    gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(("A100", "H100", "H100"))
    monkeypatch.setattr(device, "fingerprint", lambda: {"name": "H100"})  # CUDA's first one
    placement.leave_out(tmp_path)
    assert os.environ[MASK] == f"{B},{C}"


def test_nothing_taken_out_is_written_over(tmp_path: Path) -> None:
    state.write(tmp_path, {A: state.Gpu(quarantined="wrong")})
    for text in ("one", "two"):
        (tmp_path / f"{state.recorder_name('gw0', A)}.jsonl").write_text(text)
        state.take_out(tmp_path)
    assert {path.read_text() for path in state.files_of(tmp_path, A, out=True)} == {"one", "two"}


@pytest.mark.parametrize("worker", ["gw0", "gw1"])
def test_a_workers_kernel_processes_see_its_gpu_first(
    worker: str, gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their starter began before the worker knew its GPU."""
    file = tmp_path / "sees.py"
    file.write_text(SEES)
    gpus(("H100", "H100"))
    mask = device.gpus_for(worker)
    assert mask == {"gw0": f"{A},{B}", "gw1": f"{B},{A}"}[worker]
    monkeypatch.setenv(MASK, mask)
    server = ForkServer(replace(PLAIN_CPU, variables=()))
    try:
        (declaration,) = roster([file], server).declarations
    finally:
        server.close()
    assert declaration.name == mask.replace(",", "-")
    assert mask.startswith(device.own())


def test_a_judge_records_under_its_gpu(gpus, tmp_path: Path) -> None:
    from verify.campaign.run import CampaignRun

    gpus(("H100", "H100"))
    run = CampaignRun(tmp_path, "dev", ())
    run.xfails = SimpleNamespace()  # type: ignore[assignment]
    judge = run.judge("gw1")
    judge.recorder.begin("a:b:c:d", "generate")
    judge.close()
    assert state.files_of(tmp_path, A)
    assert not state.files_of(tmp_path, B)


def test_under_mps_there_are_as_many_workers_as_have_contexts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU has 48 contexts there, and a worker takes up to four."""
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement.device, "visible_gpus", lambda: ["GPU-0", "GPU-1"])
    free = dict.fromkeys(["GPU-0", "GPU-1"], 70 << 30)
    monkeypatch.setattr(placement.device, "free_memory", lambda: free)
    monkeypatch.setattr(placement, "cores", lambda: 64)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert placement.place_workers() == 2 * (70 // 3)
    (tmp_path / "control").touch()
    assert placement.place_workers() == 2 * 12
    free["GPU-1"] = 15 << 30
    assert placement.place_workers() == 12
