"""What a device can do, measured: bandwidths, matrix products, fp32 and exponentials.

On a GPU the units of an SM are measured with the loops of peaks.cu, matrix products also through
torch.  On a CPU there are a copy and torch's product.  Each is the best of a few runs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verify.cuda import compile
from verify.timing.record import Peak

SOURCE = Path(__file__).resolve().parent / "peaks.cu"
_REPEATS = 7
_CHAINS = 8  # as in peaks.cu
_THREADS = 1024
_BLOCKS = 2  # per SM
_L2_WORDS = 1 << 20  # of 16 bytes: less than the L2 of any GPU that has one to speak of
_MMA = {
    "float16": ("mma_m16n8k16<ptx::Format::float16>", 16),
    "bfloat16": ("mma_m16n8k16<ptx::Format::bfloat16>", 16),
    "float8_e4m3fn": ("mma_m16n8k32<ptx::Format::float8_e4m3fn>", 32),
}
MATRIX = ("matmul", "mma.sync")  # what the peak of a matrix product is the larger of


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("sink", ctypes.c_uint64),
        ("words", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
        ("factor", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Loop:
    """A kernel of peaks.cu.  amount: operations or bytes of a thread and round; rounds: of one
    launch."""

    entry: str
    amount: float
    rounds: int
    macros: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> compile.Source:
        return compile.Source(SOURCE, self.entry, self.macros)


@dataclass(frozen=True)
class Kind:
    """One peak.  measure(): operations or bytes per second."""

    name: str
    what: str
    unit: str
    measure: Callable[[], float]


LOOPS = {
    "fp32": Loop("fma_peak", 2 * 16 * _CHAINS, 2000),
    "ex2": Loop("ex2_peak", 16 * _CHAINS, 500),
    "shared memory": Loop("shared_peak", 16 * 8, 2000),
    "L2": Loop("l2_peak", 16, 500),  # of a word, not of a thread
    **{
        f"mma.sync {dtype}": Loop(
            "mma_peak", 4 * _CHAINS * 2 * 16 * 8 * depth / 32, 2000, (("MMA", f"ptx::{name}"),)
        )
        for dtype, (name, depth) in _MMA.items()
    },
}
_LOOP_WORDS = {
    "fp32": ("multiply-adds of two operations, FFMA", "TFLOP/s"),
    "ex2": ("ex2.approx.ftz.f32, one operation each", "Tera/s"),
    "shared memory": ("loads of 8 bytes without bank conflicts, all SMs", "GB/s"),
    "L2": ("loads of 16 bytes past L1 from 16 MiB", "GB/s"),
}


def listed(device: str) -> list[Peak]:
    """The peaks of a "cuda" or a "cpu" device, not measured yet."""
    return [
        {"name": kind.name, "what": kind.what, "value": None, "unit": kind.unit, "error": ""}
        for kind in _kinds(device).values()
    ]


def measure(device: str, name: str) -> float:
    """Measure one peak, in its unit.  Raises what the compiler, the driver or torch raise."""
    if device == "cpu":
        torch.set_num_threads(1)  # as kernels have on a CPU
    kind = _kinds(device)[name]
    return kind.measure() / (1e9 if kind.unit == "GB/s" else 1e12)


def units(device: str) -> dict[str, int]:
    """Counts and sizes that the driver reports of the current GPU; nothing of a CPU."""
    if device != "cuda":
        return {}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    named = {
        "SMs": "multi_processor_count",
        "shared bytes per SM": "shared_memory_per_multiprocessor",
        "registers per SM": "regs_per_multiprocessor",
        "L2 bytes": "L2_cache_size",
        "memory bytes": "total_memory",
    }
    return {
        name: int(getattr(found, field)) for name, field in named.items() if hasattr(found, field)
    }


def matrix_peaks(peaks: list[Peak]) -> dict[str, float]:
    """TFLOP/s of matrix products by input dtype: the faster of torch's and of the loop."""
    found: dict[str, float] = {}
    for peak in peaks:
        how, _, dtype = peak["name"].partition(" ")
        if how in MATRIX and peak["value"] is not None:
            found[dtype] = max(found.get(dtype, 0.0), peak["value"])
    return found


def _kinds(device: str) -> dict[str, Kind]:
    cuda = device == "cuda"
    dtypes = ("float16", "bfloat16", "float8_e4m3fn", "float32") if cuda else ("float32",)
    size = (1 << 30) if cuda else (1 << 25)
    what = "copy in device memory" if cuda else "copy in memory, one thread"
    kinds = [Kind("copy", f"{what}, bytes read and written", "GB/s", lambda: _copy(device, size))]
    side = 8192 if cuda else 512
    kinds += [
        Kind(
            f"matmul {dtype}",
            f"torch's product of {side} x {side}",
            "TFLOP/s",
            lambda dtype=dtype: _matmul(device, dtype, side),  # type: ignore[misc]
        )
        for dtype in dtypes
    ]
    if cuda:
        for name, loop in LOOPS.items():
            said, unit = _LOOP_WORDS.get(name, ("a loop of mma.sync, fp32 accumulators", "TFLOP/s"))
            kinds.append(Kind(name, said, unit, lambda loop=loop: _loop(loop)))  # type: ignore[misc]
    return {kind.name: kind for kind in kinds}


def _copy(device: str, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(device, lambda: target.copy_(source))


def _matmul(device: str, dtype: str, side: int) -> float:
    kind = getattr(torch, dtype)
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    return 2 * side**3 / _seconds(device, lambda: _product(a, b))


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.element_size() > 1:
        return a @ b
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _loop(loop: Loop) -> float:
    """Operations or bytes per second of a loop on the current GPU."""
    arch = compile.device_arch(torch.device("cuda", torch.cuda.current_device()))
    kernel = compile.load(compile.compile_source(loop.source, arch))
    blocks = _BLOCKS * units("cuda")["SMs"]
    data = torch.zeros(4 * _L2_WORDS, dtype=torch.int32, device="cuda")
    sink = torch.zeros(_THREADS, device="cuda")
    args = _Arguments(data.data_ptr(), sink.data_ptr(), _L2_WORDS, loop.rounds, 0.999)
    seconds = _seconds("cuda", lambda: compile.launch(kernel, (blocks,), (_THREADS,), 0, args))
    count = _L2_WORDS if loop.entry == "l2_peak" else blocks * _THREADS
    return loop.amount * count * loop.rounds / seconds


def _seconds(device: str, work: Callable[[], object]) -> float:
    """The least time of the work, after two calls that do not count."""
    times = []
    for _ in range(2 + _REPEATS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
    return float(min(times[2:]))
