"""GPUs by whatever CUDA_VISIBLE_DEVICES calls them: one has one name, for locks, evidence and
accounts, and is asked for once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.campaign.leases import hosts
from verify.machine import device, turns

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
MIG = "MIG-cccccccc-0000-0000-0000-000000000000"
_TWO = f"0, {A}, NVIDIA H100, 9.0, 580\n1, {B}, NVIDIA H100, 9.0, 580\n"
_UNLIKE = _TWO.replace("H100", "A100", 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A function that sets what nvidia-smi says and the mask; returns how often it was asked."""

    def put(said: str | None, mask: str | None) -> list[tuple[str, ...]]:
        asked: list[tuple[str, ...]] = []

        def output(command: tuple[str, ...]) -> str | None:
            asked.append(command)
            return said

        monkeypatch.setattr(device, "_output", output)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask or "")
        if mask is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        turns._named.cache_clear()
        return asked

    yield put
    turns._named.cache_clear()


@pytest.mark.parametrize(
    ("said", "mask", "visible"),
    [
        (_TWO, None, [A, B]),
        (_TWO, "1", [B]),
        (_TWO, " 1, 0", [B, A]),
        (_TWO, "GPU-bb", [B]),
        (_TWO, f"{B},{A}", [B, A]),
        (_TWO, "1,-1,0", [B]),
        (_TWO, "1,2,0", [B]),
        (_TWO, "", []),
        (_TWO, "-1", []),
        (_TWO, f"{MIG},1", [MIG, B]),
        (_UNLIKE, "1,0", ["1", "0"]),
        (_UNLIKE, "GPU-bb", [B]),
        (None, None, []),
        (None, "1,0", ["1", "0"]),
        (None, "1,,0", ["1"]),
    ],
)
def test_visible_gpus(machine, said: str | None, mask: str | None, visible: list[str]) -> None:
    machine(said, mask)
    assert device.visible_gpus() == visible
    assert device.own() == (visible[0] if visible and said else "")
    assert hosts.visible_gpus() == (visible if said else [])


def test_a_mask_of_whole_names_needs_no_question(machine) -> None:
    asked = machine(_TWO, f"{B},{A}")
    assert device.gpus_for("gw1") == f"{A},{B}"
    assert not asked


@pytest.mark.parametrize(("mask", "gpu"), [(None, A), ("0", A), ("GPU-aa", A), (A, A), ("1,0", B)])
def test_a_gpu_has_one_lock_whatever_it_is_called(machine, mask: str | None, gpu: str) -> None:
    asked = machine(_TWO, mask)
    assert turns._named(mask) == gpu
    before = len(asked)
    assert turns._named(mask) == gpu
    assert len(asked) == before  # a launch takes a turn: it must not ask a program


@pytest.mark.parametrize(("mask", "name"), [(None, "all"), ("3,1", "3")])
def test_without_nvidia_smi_a_lock_has_the_name_in_the_mask(
    machine, mask: str | None, name: str
) -> None:
    machine(None, mask)
    assert turns._named(mask) == name


def test_forks_know_the_gpus_that_were_asked_for_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {log}\nprintf '{_TWO}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(device, "_known", None)
    device.know_gpus(device.ask_gpus())
    assert device.visible_gpus() == [B, A]
    assert (device.uuid(), device.own(), device.gpus()) == (B, B, [A, B])
    assert device.models() == {A: "NVIDIA H100", B: "NVIDIA H100"}
    assert log.read_text() == "asked\n"


def test_a_machine_without_nvidia_smi_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device, "_known", None)
    asked = device.ask_gpus()
    assert asked is None
    device.know_gpus(asked)
    assert device.gpus() == []


def test_a_program_of_its_own_asks_again(machine) -> None:
    """As a fork of a starter is, whose variables can name another nvidia-smi."""
    asked = machine(_TWO, None)
    device.know_gpus(None)
    assert device.gpus() == []
    device.forget_gpus()
    assert (device.gpus(), len(asked)) == ([A, B], 1)


def test_workers_of_a_campaign_have_one_gpu_each(machine) -> None:
    machine(_TWO, "1,0,-1")
    assert hosts.placed(None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in (B, A)]
    with pytest.raises(hosts.HostError, match="3 workers: one a GPU, and this machine has 2"):
        hosts.placed(3)
    machine(_TWO, f"{MIG},{MIG.replace('c', 'd')}")
    assert len({each["CUDA_VISIBLE_DEVICES"] for each in hosts.placed(2)}) == 2


def test_free_memory(machine) -> None:
    machine(f"{A}, 81000\n{B}, [N/A]\n", None)
    assert device.free_memory() == {A: 81000 << 20}
