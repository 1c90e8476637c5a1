"""Reference and bounds on two devices: how far they are apart, and how long they take.

`python -m tests.harness.judge_devices cuda` compares a GPU with the CPU over drawn problems, of
several declared arithmetics, forward and backward; it needs torch and numpy alone.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from statistics import mean, median

import torch
from torch import Tensor

from references.masks import Causal, Full, Window
from verify.judging.truth import compute_truth_on
from verify.problem import Problem
from verify.problem.inputs import dequantised, dout, tensors
from verify.statistics.rows import SUITED
from verify.tolerance import backward, forward
from verify.variant import Config, GradientNumerics, Maximum, Numerics, Output, Softmax

FORWARDS = {
    "P rounded": Numerics(),
    "ordered": Numerics(softmax=Softmax(maximum=Maximum(key_order="ascending"))),
    "split keys": Numerics(output=Output(split_keys=True)),
    "best": forward.BEST,
}
BACKWARDS = {"P and dS rounded": GradientNumerics(), "best": backward.BEST}
CONFIG = Config(block_m=64, block_n=64)
ARCHS = ("sm_90", "cpu")
# below this an exponential can be subnormal on one device and 0 on the other
TINY = 2.0**-1000


@dataclass(frozen=True)
class Apart:
    """Two results of one problem.  values: the largest difference of an exact result, in units of
    its bound.  bounds: the largest relative one of a bound.  intervals: the share of intervals
    whose reach differs by more than 1e-9 of it, as one does where a P lies at a tie.  infinite: how
    many elements are infinite in one of them alone.  Elements that are neither 0 nor above `TINY`
    in both are not compared."""

    values: float
    bounds: float
    intervals: float
    infinite: int


def problems(count: int, number: int = 1) -> Iterator[Problem]:
    """Drawn problems, as large as those of a campaign on a GPU; the same ones for a number."""
    draw = Random(number)
    for _ in range(count):
        heads_kv = draw.choice((1, 1, 2, 4))
        heads_q = heads_kv * draw.choice((1, 2, 3))
        rows, keys = (draw.randint(1, draw.choice((40, 200, 520))) for _ in range(2))
        most = (1 << 19) // (heads_q * rows * keys)
        dtype = draw.choice(("float16", "bfloat16", "float32"))
        yield Problem(
            batch=max(min(draw.choice((1, 2, 4)), most), 1),
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=rows,
            seqlen_kv=keys,
            head_dim=draw.choice((16, 64, 64, 72, 128, 256)),
            dtype=dtype,
            mask=draw.choice((Full(), Causal(), Window(16, 0))),
            distribution=draw.choice((*SUITED, "below_sentinel", "large_logits")),
            seed=draw.randint(0, 1 << 30),
        )


def apart(
    mine: dict[str, tuple[Tensor, Tensor]], theirs: dict[str, tuple[Tensor, Tensor]]
) -> Apart:
    """Of results by name: (value, bound), or (middle, reach) where the name says interval."""
    values, bounds, odd, infinite, elements = 0.0, 0.0, 0, 0, 0
    for name, (value, bound) in mine.items():
        other, limit = theirs[name]
        largest = torch.maximum(value.abs(), other.abs())
        compared = ~((largest > 0) & (largest <= TINY))
        finite = bound.isfinite() & limit.isfinite() & compared
        infinite += int((bound.isfinite() != limit.isfinite()).sum())
        off = torch.where(finite, (bound - limit).abs(), 0.0)
        part = torch.where(off == 0, 0.0, off / torch.maximum(bound, limit))
        if not part.numel():
            continue
        if "interval" in name:
            odd += int((part > 1e-9).sum())
            elements += part.numel()
            continue
        bounds = max(bounds, float(part.max()))
        seen = finite & value.isfinite() & other.isfinite()
        off = torch.where(seen, (value - other).abs(), 0.0)
        values = max(values, float(torch.where(off == 0, 0.0, off / bound).max()))
    return Apart(values, bounds, odd / max(elements, 1), infinite)


@lru_cache(maxsize=1)
def given(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dO, on the CPU."""
    return *dequantised(p, tensors(p)), dout(p)


@lru_cache(maxsize=1)
def saved(p: Problem, arch: str) -> tuple[Tensor, Tensor]:
    """O and LSE as an honest forward saves them, on the CPU."""
    arithmetic = forward.resolve(forward.BEST, CONFIG, p, arch)
    found = compute_truth_on(torch.device("cpu"), p, given(p)[:3], [arithmetic])
    return found.out.to(p.format.torch), found.lse.float().double()


def of_forward(
    p: Problem, numerics: Numerics, arch: str, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """O, LSE and the interval of O, computed on that device."""
    arithmetic = forward.resolve(numerics, CONFIG, p, arch)
    found = compute_truth_on(device, p, given(p)[:3], [arithmetic])
    made = {"out": (found.out, found.out_bound), "lse": (found.lse, found.lse_bound)}
    if found.interval is not None:
        made["interval of out"] = found.interval.middle, found.interval.reach
    return made


def of_backward(
    p: Problem, numerics: GradientNumerics, arch: str, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """The gradients of an O and an LSE that were saved as an honest forward does, and their
    intervals."""
    arithmetic = backward.resolve(numerics, CONFIG, p, arch)
    q, k, v, d_out, out, lse = (x.to(device) for x in (*given(p), *saved(p, arch)))
    found = backward.gradient_truth(p, q, k, v, d_out, out, lse, arithmetic).to("cpu")
    made = {name: (getattr(found, name), getattr(found, f"{name}_bound")) for name in _GRADIENTS}
    for name, span in (found.intervals or {}).items():
        made[f"interval of {name}"] = span.middle, span.reach
    return made


_GRADIENTS = ("dq", "dk", "dv")


def compare(device: torch.device, count: int) -> bool:
    """Print a table, one line per arithmetic; whether all agree within rounding."""
    cpu, right = torch.device("cpu"), True
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    worst: dict[str, Apart] = {}
    jobs = [(f"forward, {name}", of_forward, n) for name, n in FORWARDS.items()]
    jobs += [(f"backward, {name}", of_backward, n) for name, n in BACKWARDS.items()]
    for number, p in enumerate(problems(count)):
        arch = ARCHS[number % len(ARCHS)]
        saved(p, arch)
        for name, of, numerics in jobs:
            made = []
            for where in (device, cpu):
                begun = time.perf_counter()
                made.append(of(p, numerics, arch, where))
                if number >= count // 10:  # warm
                    seconds[name, where.type].append(time.perf_counter() - begun)
            found, old = apart(*made), worst.get(name, Apart(0.0, 0.0, 0.0, 0))
            if found.values > 1e-4 or found.bounds > 1e-6 or found.infinite:
                print(f"APART: {name}, {arch}, {p.name}: {found}")
                right = False
            worst[name] = Apart(
                max(found.values, old.values),
                max(found.bounds, old.bounds),
                max(found.intervals, old.intervals),
                found.infinite + old.infinite,
            )
    print(f"{count} problems; ms of reference and bounds: median (mean), transfers included")
    for name, far in worst.items():
        times = [seconds[name, where.type] for where in (device, cpu)]
        told = " ".join(
            f"{where.type} {1e3 * median(t):.1f} ({1e3 * mean(t):.1f})"
            for where, t in zip((device, cpu), times, strict=True)
        )
        print(
            f"{name:26s} values {far.values:.1e} of the bound, bounds {far.bounds:.1e},"
            f" reaches beyond 1e-9 {far.intervals:.1e}, infinite {far.infinite}; {told}"
        )
    print("the devices agree" if right else "THE DEVICES DISAGREE")
    return right


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = torch.device(sys.argv[1])
    sys.exit(not compare(asked, int(sys.argv[2]) if len(sys.argv) > 2 else 60))
