"""Triton's scratch memory comes filled in a sanitized process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import _allocation

from verify.sanitizers import scratch


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_allocation, "_allocator", _allocation._allocator)


def sevens(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.full((size,), 7, dtype=torch.int8)


def test_a_buffer_comes_filled_whenever_the_allocator_was_set() -> None:
    triton.set_allocator(sevens)
    scratch.fill()
    scratch.fill()
    assert not _allocation._allocator.get()(16, 8, None).any()
    triton.set_allocator(lambda size, alignment, stream: sevens(2 * size, alignment, stream))
    found = _allocation._allocator.get()(16, 8, None)
    assert (found.numel(), bool(found.any())) == (32, False)


def test_without_an_allocator_a_launch_is_told_so() -> None:
    scratch.fill()
    triton.set_allocator(_allocation.NullAllocator())
    with pytest.raises(RuntimeError, match="no allocator was set"):
        _allocation._allocator.get()(16, 8, None)


def test_it_loads_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime._allocation")
    scratch.fill()
    assert "triton.runtime._allocation" not in sys.modules


def test_tritons_launcher_looks_where_it_is_replaced() -> None:
    """Else a newer Triton would pass it by in silence."""
    driver: ModuleType = pytest.importorskip("triton.backends.nvidia.driver")
    assert driver._allocation is _allocation
    text = Path(driver.__file__).read_text(encoding="utf-8")
    assert "_allocation._allocator" in text
