"""Device memory that kernels keep, over an allocator that only counts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from verify.cell import kernel_process
from verify.cell.device_memory import DeviceMemory, unavailable
from verify.cell.limits import Output
from verify.cell.process import Cell, _bytes

TOTAL = 80 << 30
SPARE = 2 << 20  # bytes that torch's pool holds and has not allocated


class Allocator:
    """Counts memory taken from torch's allocator, and memory that others take from the driver."""

    def __init__(self) -> None:
        self.allocated = 1000  # the judge's arena
        self.others = 0

    def mem_get_info(self) -> tuple[int, int]:
        return TOTAL - self.allocated - SPARE - self.others, TOTAL


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda: {"allocated_bytes": {"all": {"current": allocator.allocated}}},
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: allocator.allocated + SPARE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", allocator.mem_get_info)
    return allocator


Takes = Callable[[int], Callable[[], None]]


@pytest.fixture
def takes(allocator: Allocator) -> Takes:
    """A function that returns a launch which keeps that many bytes."""

    def launch_of(size: int) -> Callable[[], None]:
        return lambda: setattr(allocator, "allocated", allocator.allocated + size)

    return launch_of


def test_a_leak_grows_at_every_launch(takes: Takes) -> None:
    memory = DeviceMemory()
    assert [memory.watch(takes(512))["kept"] for _ in range(4)] == [512] * 4


def test_what_is_given_back_or_kept_for_the_next_launch_is_no_growth(takes: Takes) -> None:
    memory = DeviceMemory()
    sizes = [0, 4096, 1024, 2048, 4096, 8192, 512]  # of the buffer that is kept
    changes = [new - old for old, new in zip([0, *sizes], sizes, strict=False)]
    kept = [memory.watch(takes(change))["kept"] for change in changes]
    assert kept == [0, 4096, 0, 0, 0, 4096, 0]


def test_the_judges_own_arena_does_not_count(takes: Takes, allocator: Allocator) -> None:
    memory = DeviceMemory()
    for size in (1 << 20, 1 << 30):
        allocator.allocated = size
        assert memory.watch(takes(0)) == {"kept": 0, "taken": 0}


def test_what_is_taken_beside_torchs_pool_is_told_apart(takes: Takes, allocator: Allocator) -> None:
    memory = DeviceMemory()
    allocator.others = 5 << 30  # before the first launch
    assert memory.watch(takes(0)) == {"kept": 0, "taken": 0}
    allocator.others += 100
    assert memory.watch(takes(7)) == {"kept": 7, "taken": 100}
    allocator.others -= 300
    assert memory.watch(takes(0)) == {"kept": 0, "taken": 0}


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cuda", {"status": "ok", "kept": 64, "taken": 0}),
        ("cpu", {"status": "ok"}),
    ],
)
def test_a_run_on_a_device_says_what_it_kept(
    device: str, wanted: dict[str, Any], takes: Takes, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def on_device(
        self: kernel_process.KernelProcess, message: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        yield torch.empty(0, dtype=torch.uint8)

    monkeypatch.setattr(kernel_process.KernelProcess, "_on_device", on_device)
    monkeypatch.setattr(kernel_process, "launch", lambda variant, message, arena: takes(64)())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = kernel_process.KernelProcess(ours)
        process.variants["kernel"] = cast(Any, None)
        assert process._answer({"op": "run", "variant": "kernel", "device": device}, []) == wanted


@pytest.mark.parametrize("said", [None, "64", -1, True, 1 << 60, 0.5, [64]])
def test_what_is_no_number_of_bytes_is_none(said: object) -> None:
    assert _bytes(said) == 0
    assert _bytes(64) == 64


def test_the_numbers_of_a_process_reach_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        cell = cast(Any, object.__new__(Cell))
        cell._socket, cell._pid, cell._requests = ours, 1, 0
        cell._output = Output(0)
        monkeypatch.setattr("verify.cell.process.resident", lambda pid: 0)
        monkeypatch.setattr("verify.cell.process.held", lambda pid: 0)
        monkeypatch.setattr("verify.cell.limits.held", lambda pid: 0)
        monkeypatch.setattr("verify.cell.process.send", lambda *words: None)
        said = {"status": "ok", "kept": 64, "taken": "many", "request": 1}
        monkeypatch.setattr("verify.cell.process.receive", lambda *words, **more: (said, []))
        reply = cell._ask({"op": "run"}, 1.0)
    assert (reply.status, reply.kept, reply.taken) == ("ok", 64, 0)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "MPS client failed to connect to the MPS control daemon or the MPS server",
        "the remote procedural call between the MPS server and the MPS client failed",
        "MPS server is not ready to accept new MPS client requests",
        "the hardware resources required to create MPS client have been exhausted",
        "the hardware resources required to support device connections have been exhausted",
    ],
)
def test_a_device_that_takes_no_further_process_is_not_the_kernels_fault(said: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = kernel_process.KernelProcess(ours)
        busy = process._crowded_out(RuntimeError(said))
        assert busy == {"status": "device busy", "message": said, "on_device": True}
        # This process was let onto the device before: the kernel alone can say so now.
        process.room = {"room": 1 << 30, "total": TOTAL}
        assert process._crowded_out(RuntimeError(said)) is None


def test_other_errors_are_the_kernels_own() -> None:
    assert not unavailable(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not unavailable(RuntimeError("the MPS client has been terminated by the server"))
    assert not unavailable(ValueError("busy or unavailable"))
