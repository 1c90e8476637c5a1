"""Where the time of the judge's truth goes: `python -m tests.harness.truth_speed [ROWS [SIDE]]`.

It prints the rate of the fp64 reference of ROWS rows and keys for tiles of several sizes, beside
that of an fp64 product; then, of reference and bounds of SIDE rows and keys together, the seconds
of both and the operations that take most of the device's time.  Head dim 128, one head.  Without a
GPU it measures the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from references.attention import forward
from references.definition import Attention
from references.masks import Full
from verify.judging.truth import Clock, compute_truth_on
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance import forward as bounds
from verify.variant import Config, Numerics

HEAD_DIM = 128
TILES = ((None, None), (8192, 1024), (4096, 1024), (4096, 512), (2048, 2048), (2048, 1024))
_PRODUCT = 8192  # the side of the product that the reference is compared with
_REPEATS = 5
_SHOWN = 25  # operations


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall clock of one call, the median of several."""

    def once() -> float:
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    once()
    return median(once() for _ in range(_REPEATS))


def rates(rows: int, device: torch.device, side: int = _PRODUCT) -> Iterator[tuple[str, float]]:
    """TFLOP/s of an fp64 product, and of the reference by its tiles (None: its own choice)."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.float64) for _ in range(2))
    yield "fp64 product", 2 * side**3 / seconds(lambda: a @ b, device) / 1e12
    q, k, v = (torch.randn(1, 1, rows, HEAD_DIM, device=device) for _ in range(3))
    attention = Attention(Full(), HEAD_DIM**-0.5)
    for block_q, block_kv in TILES:
        taken = seconds(
            lambda q_=block_q, kv=block_kv: forward(q, k, v, attention, block_q=q_, block_kv=kv),
            device,
        )
        yield f"tiles of {block_q} rows, {block_kv} keys", 4 * rows**2 * HEAD_DIM / taken / 1e12


def shares(side: int, device: torch.device) -> Iterator[str]:
    """Seconds of reference and bounds, medians, and the most expensive operations of both."""
    found = []
    arithmetic = None
    for seed in range(_REPEATS + 1):
        p = Problem(seqlen_q=side, seqlen_kv=side, head_dim=HEAD_DIM, dtype="bfloat16", seed=seed)
        arithmetic = bounds.resolve(Numerics(), Config(), p, "sm_90")
        inputs, clock = dequantised(p, tensors(p)), Clock()
        compute_truth_on(device, p, inputs, [arithmetic], clock)
        found.append(clock.seconds)
    for name in ("reference", "bound"):
        yield f"{name}: {1e3 * median(each[name] for each in found[1:]):.3f} ms"
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as recorded:
        compute_truth_on(device, p, inputs, [arithmetic], Clock())
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    every = sorted(recorded.key_averages(), key=lambda event: -getattr(event, key))
    for event in every[:_SHOWN]:
        yield f"{getattr(event, key) / 1e3:9.3f} ms {event.count:5d} times {event.key[:90]}"


def main(words: list[str]) -> int:
    """Returns an exit code."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rows, side = (32768, 8192) if cuda else (2048, 1024)
    if words:
        rows, side = int(words[0]), int(words[-1])
    product = 0.0
    for label, rate in rates(rows, device, _PRODUCT if cuda else min(_PRODUCT, rows)):
        product = product or rate
        print(f"{label}: {rate:.3f} TFLOP/s, {100 * rate / product:.0f} %", flush=True)
    for line in shares(side, device):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
