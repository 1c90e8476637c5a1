"""The arena's pinned memory, with a fake CUDA runtime that only records calls."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from verify.cell.child import KernelProcess


class Notes:
    """A fake runtime that, like CUDA's, refuses to register a byte twice."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refusals = 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if any(
            start < old + length and old < start + size for old, length in self.registered.items()
        ):
            self.refusals += 1
            return 208
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802 - CUDA's name
        del self.registered[start]
        return 0


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: notes)
    return notes


@pytest.fixture
def process() -> Iterator[KernelProcess]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield KernelProcess(ours)


def mapped(process: KernelProcess, capacity: int) -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, capacity)
    process._map(fd, capacity)


def test_an_arena_that_grows_is_pinned_anew(notes: Notes, process: KernelProcess) -> None:
    for size in (1 << 16, 1 << 17, 1 << 20, 1 << 17):
        mapped(process, size)
        assert notes.registered == {process.host.data_ptr(): size}
    assert notes.refusals == 0


def test_what_cuda_holds_against_the_arena_is_not_left_for_the_kernel(
    notes: Notes,
    process: KernelProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CUDA reports an error once, at the next call: here a launch that the cell itself makes."""
    asked: list[object] = []

    def launched(*size: int, device: str) -> None:
        asked.append((size, device))
        raise RuntimeError("CUDA error: resource already mapped")

    monkeypatch.setattr(torch, "zeros", launched)
    monkeypatch.setattr(notes, "cudaHostRegister", lambda *region: 208)
    mapped(process, 1 << 16)
    assert asked == [((1,), "cuda")]
    assert "could not be pinned: 208" in capsys.readouterr().out
    mapped(process, 1 << 17)  # nothing is pinned, so nothing is to be given up
    assert notes.registered == {}
