"""What the sweeps over honest arithmetic share: their command line, their loop over emulated
kernels and dtypes, and the search for a worse problem around the worst one.

A sweep (`python3 -m tests.NAME_sweep`) judges emulated kernels that are right, and ends with 1 if
one is refused.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tests.harness.emulation import Kernel
from verify.problem import Problem

Swept = Callable[[Kernel, str, argparse.Namespace], tuple[int, int]]
"""Sweep one arithmetic in one dtype: how many units were judged, and how many were refused."""


def options(
    doc: str | None, arguments: list[str] | None, **counts: tuple[int, str]
) -> argparse.Namespace:
    """The command line of a sweep: `--only`, and counts by name, each a default and its meaning."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    for name, (default, about) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=about)
    parser.add_argument("--only", default="", help="a part of the name of the arithmetics to run")
    return parser.parse_args(arguments)


def over(kernels: Iterable[Kernel], asked: argparse.Namespace, swept: Swept) -> tuple[int, int]:
    """Sweep the kernels whose name has `--only` in it, in each of their dtypes, on one core; the
    sums of what `swept` returns."""
    torch.set_num_threads(1)
    judged = refused = 0
    for kernel in kernels:
        if asked.only not in kernel.name:
            continue
        for dtype in kernel.dtypes:
            counted, bad = swept(kernel, dtype, asked)
            judged += counted
            refused += bad
    return judged, refused


def nearby(problem: Problem, step: int) -> Problem:
    """A variant of a problem, the same for the same step: another scale, and with every fourth step
    another seed."""
    made = random.Random(step)
    scale = problem.scale * (1 + made.choice((1e-6, 1e-4, 1e-2)) * made.uniform(-1, 1))
    seed = problem.seed + (step % 4 == 0) * made.randrange(1 << 16)
    return replace(problem, softmax_scale=scale, seed=seed)
