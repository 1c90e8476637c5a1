"""Where the time of the judge's truth goes: `python -m tests.harness.truth_speed [ROWS [SIDE]]`.

It prints the rate of the fp64 reference of ROWS rows and keys for tiles of several sizes, beside
that of an fp64 product; then, of reference and bounds of SIDE rows and keys together, the seconds
of both and the operations that take most of the device's time.  Head dim 128, one head.  Without a
GPU it measures the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from verify.cli.bench_suite import HEAD_DIM, product_rate, reference_rate
from verify.judging.truth import Clock, compute_truth_on
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance import forward as bounds
from verify.variant import Config, Numerics

TILES = (  # rows and keys; None: the reference's own choice
    (None, None),
    (8192, 1024),
    (4096, 1024),
    (4096, 512),
    (2048, 2048),
    (2048, 1024),
)
_PRODUCT = 8192  # the side of the product that the reference is compared with
_REPEATS = 5
_SHOWN = 25  # operations


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
    device = "cuda" if cuda else "cpu"
    rows, side = (32768, 8192) if cuda else (2048, 1024)
    if words:
        rows, side = int(words[0]), int(words[-1])
    product = product_rate(min(_PRODUCT, rows), device)
    print(f"fp64 product: {product:.3f} TFLOP/s", flush=True)
    for block_q, block_kv in TILES:
        rate = reference_rate(rows, device, block_q, block_kv)
        share = f"{rate:.3f} TFLOP/s, {100 * rate / product:.0f} %"
        print(f"tiles of {block_q} rows, {block_kv} keys: {share}", flush=True)
    for line in shares(side, torch.device(device)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
