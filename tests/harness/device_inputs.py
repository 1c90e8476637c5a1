"""Figures of docs/performance.md: `python -m tests.harness.device_inputs [DEVICE]` in a checkout.

It holds inputs that a device makes against those of the CPU, bit for bit, for every distribution
and dtype, and prints what one case takes: made on the CPU, made there and sent, made on the device.
DEVICE: cuda (the default) or cpu.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from verify.arithmetic.dtypes import DTYPES
from verify.problem import Problem, ProblemError
from verify.problem.distributions import DISTRIBUTIONS
from verify.problem.inputs import Inputs, dout, tensors

# Of q, k and v: 786,432 elements, the most of a drawn problem on a GPU; and few.
_LARGE = "b=2,hq=4,hkv=4,sq=512,skv=512,d=64,seed=3"
_SMALL = "hq=2,hkv=2,sq=64,skv=128,d=32,seed=3"
_RUNS = 5


def differing(device: str) -> list[str]:
    """Names of the problems whose inputs or dO a device makes otherwise than the CPU."""
    names = []
    for distribution in DISTRIBUTIONS:
        for dtype in DTYPES:
            for text in (_SMALL, f"{_LARGE},lk=transposed.p8,lv=bhsd.xh"):
                problem = Problem.parse(f"{text},dtype={dtype},dist={distribution}")
                try:
                    here = [*tensors(problem).named.values(), dout(problem)]
                except ProblemError:
                    continue
                there = [*tensors(problem, device).named.values(), dout(problem, device)]
                pairs = zip(here, there, strict=True)
                if not all(_same(one, other.cpu()) for one, other in pairs):
                    names.append(problem.name)
    return names


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def milliseconds(make: Callable[[], Inputs], device: str) -> float:
    """Milliseconds of wall clock until the inputs are there; the median."""

    def once() -> float:
        begun = time.perf_counter()
        make()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun)

    once()
    return statistics.median(once() for _ in range(_RUNS))


def _sent(problem: Problem, device: str) -> Inputs:
    made = tensors(problem)
    return Inputs(*(made.named[name].to(device) for name in "qkv"))


def main(device: str = "cuda") -> None:
    """Print what differs, and the times."""
    torch.set_num_threads(1)
    for text in (_LARGE, _SMALL):
        rows = []
        for distribution in DISTRIBUTIONS:
            problem = Problem.parse(f"{text},dtype=bfloat16,dist={distribution}")
            row = (
                milliseconds(lambda p=problem: tensors(p), "cpu"),  # type: ignore[misc]
                milliseconds(lambda p=problem: _sent(p, device), device),  # type: ignore[misc]
                milliseconds(lambda p=problem: tensors(p, device), device),  # type: ignore[misc]
            )
            rows.append(row)
            print(f"{distribution:16}" + "".join(f"{each:9.3f}" for each in row))
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        print(f"{'mean, ms':16}" + "".join(f"{each:9.3f}" for each in means) + f"  {text}")
        print(f"{'':16}      CPU     sent   device")
    wrong = differing(device)
    print("differ:", *wrong) if wrong else print("all bits are the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
