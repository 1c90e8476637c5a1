"""Where references are computed: on a GPU where that pays, and on the CPU where it is full."""

from __future__ import annotations

import pytest
import torch

from verify.judging import truth

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU that takes notes of what is given back."""
    notes: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: notes.append("emptied"))
    return notes


def test_large_references_are_computed_on_the_gpu(emptied: list[str]) -> None:
    assert truth.on_device(1e12, str) == "cuda"
    assert truth.on_device(1e3, str) == "cpu"
    assert not emptied


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),  # as torch says it where CUDA starts
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_gpu_leaves_the_reference_to_the_cpu(error: Exception, emptied: list[str]) -> None:
    tried = []

    def compute(device: torch.device) -> str:
        tried.append(device)
        if device == GPU:
            raise error
        return "the truth"

    assert truth.on_device(1e12, compute) == "the truth"
    assert tried == [GPU, CPU]
    assert emptied == ["emptied"]


def test_other_errors_and_a_full_host_are_raised(emptied: list[str]) -> None:
    def full(device: torch.device) -> None:
        raise torch.OutOfMemoryError(str(device))

    with pytest.raises(torch.OutOfMemoryError, match="cpu"):
        truth.on_device(1e3, full)

    def wrong(device: torch.device) -> None:
        raise RuntimeError(str(device))

    with pytest.raises(RuntimeError, match="cuda"):
        truth.on_device(1e12, wrong)
    assert not emptied
