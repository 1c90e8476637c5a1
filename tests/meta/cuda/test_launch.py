"""Launches: arguments, shared memory and the driver's errors, without a device."""

from __future__ import annotations

import ctypes
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.harness.interpreter_child import in_child
from tests.meta.cuda.test_compile import compiles
from verify.cuda import compile as cuda
from verify.cuda.compile import (
    Binary,
    CompileError,
    Kernel,
    LaunchError,
    Source,
    compilable,
    compile_source,
)
from verify.variant import Resources

MADE = Binary(b"cubin", "doubled", Resources(8, 0, 0, 0, 0))


# Where nothing can be compiled or run.


def test_without_cuda_core_there_is_a_reason(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = compilable.__wrapped__()
    assert reason is not None
    assert "cuda.core" in reason
    monkeypatch.setattr(cuda, "compilable", lambda: reason)
    with pytest.raises(CompileError, match=re.escape(reason)):
        compile_source(source, "sm_90a")


def test_kernels_import_without_cuda_core() -> None:
    code = "import kernels.ptx.split_q, sys; sys.exit('cuda.core' in sys.modules)"
    assert in_child("-c", code).returncode == 0


def test_nothing_is_loaded_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: "no CUDA device")
    with pytest.raises(LaunchError, match="no CUDA device"):
        cuda.load(MADE)


class Pair(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("number", ctypes.c_float)]


@compiles
@pytest.mark.parametrize(
    "wrong",
    [(0,), (0, 0), (0, np.float64(1)), (0, Pair(), 0), (0, 1.0), (0, None)],
    ids=["few", "narrow", "numpy", "many", "float", "none"],
)
def test_arguments_that_do_not_fit_are_not_launched(wrong: tuple[Any, ...]) -> None:
    kernel = Kernel(handle=None, entry="doubled", sizes=(8, 4))
    with pytest.raises(LaunchError):
        cuda.launch(kernel, (1,), (32,), 0, *wrong)


ARGUMENTS = (2**40 + 1, np.float32(1.5), ctypes.c_int32(-2), Pair(3, 1.5))
BYTES = [
    (2**40 + 1).to_bytes(8, "little"),
    b"\0\0\xc0\x3f",
    b"\xfe\xff\xff\xff",
    b"\3" + bytes(7) + b"\0\0\xc0\x3f" + bytes(4),
]
KERNEL = Kernel(SimpleNamespace(handle=0x77), "doubled", tuple(len(data) for data in BYTES))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake driver that records its calls and answers with `status`."""
    from cuda.bindings import driver

    calls = SimpleNamespace(status=0, launches=[], allowed=[])

    def launch(function: int, *rest: Any) -> tuple[int]:
        pointers = (ctypes.c_void_p * len(KERNEL.sizes)).from_address(rest[-2])
        data = [
            ctypes.string_at(pointer, size)
            for pointer, size in zip(pointers, KERNEL.sizes, strict=True)
        ]
        calls.launches.append((function, *rest[:-2], data))
        return (calls.status,)

    def allow(attribute: Any, size: int, kernel: int, device: int) -> tuple[int]:
        calls.allowed.append(
            (attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), size, kernel, device)
        )
        return (calls.status,)

    monkeypatch.setattr(driver, "cuLaunchKernel", launch)
    monkeypatch.setattr(driver, "cuKernelSetAttribute", allow)
    monkeypatch.setattr(cuda, "_make_current", lambda: None)
    monkeypatch.setattr(cuda, "_allowed", {})
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0x55))
    return calls


@compiles
def test_a_launch_passes_what_it_was_given(driver: SimpleNamespace) -> None:
    cuda.launch(KERNEL, (5, 2), (128,), 1024, *ARGUMENTS)
    assert driver.launches == [(0x77, 5, 2, 1, 128, 1, 1, 1024, 0x55, BYTES)]


@compiles
def test_much_shared_memory_is_asked_for_once(driver: SimpleNamespace) -> None:
    for size in (48 * 1024, 60_000, 80_000, 60_000, 80_000):
        cuda.launch(KERNEL, (1,), (32,), size, *ARGUMENTS)
    assert driver.allowed == [
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", size, 0x77, 3) for size in (60_000, 80_000)
    ]


@compiles
def test_an_error_of_the_driver_is_raised(driver: SimpleNamespace) -> None:
    driver.status = 1
    for size, what in ((0, r"launch of \(1,\)"), (60_000, "bytes of shared memory")):
        with pytest.raises(LaunchError, match=f"doubled: .*{what}.*: 1"):
            cuda.launch(KERNEL, (1,), (32,), size, *ARGUMENTS)
