"""`python3 -m tests.known_roundings_sweep`: many honest forwards against what is known of their O.

Every arithmetic of `tests.harness.ordered_forwards` runs on every distribution and shape, with
exponentials to nearest and with their largest errors, until as many elements of O are judged as
asked for.  Then the worst problem of each is varied in its scale and seed, and variants that come
nearer to the limit are varied again.  It fails where an honest element is refused, and prints one
line per arithmetic and dtype: elements, the largest part of the interval that one needs, the share
of elements with one acceptable number, and the median of bound / known interval.  Last come
declarations that are mixed at random.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys

from tests.harness import sweeps
from tests.harness.emulation import Kernel, Luck
from tests.harness.ordered_forwards import HONEST, SHAPES, Judged, judged, mixed, problem_of, suits
from verify.problem import Problem
from verify.problem.distributions import ordinary

_LUCKS = tuple(Luck)


def main(arguments: list[str] | None = None) -> int:
    """Judge as many elements as the command line asks for; 1 if one was refused."""
    asked = sweeps.options(
        __doc__,
        arguments,
        elements=(1_000_000, "of each arithmetic"),
        climb=(40, "variants of the worst problem"),
        mixed=(2000, "problems of mixed declarations"),
    )
    _, refused = sweeps.over(HONEST, asked, _swept)
    refused += _mixed(asked.mixed)
    return 1 if refused else 0


def _mixed(problems: int) -> int:
    """How many elements of kernels that mix declarations were refused, in so many problems."""
    made = random.Random(problems)
    distributions = tuple(ordinary())
    counted = refused = 0
    worst = 0.0
    for _ in range(problems):
        kernel = mixed(made)
        shape = made.choice([shape for shape in SHAPES if suits(kernel, shape)])
        dtype, distribution = made.choice(kernel.dtypes), made.choice(distributions)
        problem = problem_of(shape, dtype, distribution, made.randrange(1 << 16))
        luck = made.choice(_LUCKS)
        found = judged(problem, kernel, luck)
        counted += found.known.numel()
        refused += _refused(found, problem, kernel, luck)
        worst = max(worst, found.worst)
    print(f"mixed: {counted} elements, {refused} refused, at most {worst:.4f}", flush=True)
    return refused


def _swept(kernel: Kernel, dtype: str, asked: argparse.Namespace) -> tuple[int, int]:
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    counted = refused = 0
    best: tuple[float, Problem, Luck] | None = None
    single: list[float] = []
    sharper: list[float] = []
    for number, (shape, distribution) in enumerate(
        (shape, distribution)
        for turn in itertools.count()
        for distribution, shape in itertools.product(ordinary(), shapes)
    ):
        if counted >= asked.elements:
            break
        problem = problem_of(shape, dtype, distribution, seed=number)
        luck = _LUCKS[number % len(_LUCKS)]
        found = judged(problem, kernel, luck)
        counted += found.known.numel()
        refused += _refused(found, problem, kernel, luck)
        single.append(found.single)
        if math.isfinite(found.sharper()):  # else nothing is asked
            sharper.append(found.sharper())
        if best is None or found.worst > best[0]:
            best = found.worst, problem, luck
    for step in range(asked.climb if best is not None else 0):
        assert best is not None
        problem = sweeps.nearby(best[1], step)
        found = judged(problem, kernel, best[2])
        counted += found.known.numel()
        refused += _refused(found, problem, kernel, best[2])
        if found.worst > best[0]:
            best = found.worst, problem, best[2]
    assert best is not None
    wider = statistics.median(sharper or [1.0])
    print(
        f"{kernel.name}, {dtype}: {counted} elements, {refused} refused, at most {best[0]:.4f},"
        f" one number {statistics.median(single):.2f}, bound {wider:.1f} times"
        f" as wide; worst {best[1].name}, {best[2].value}",
        flush=True,
    )
    return counted, refused


def _refused(found: Judged, problem: Problem, kernel: Kernel, luck: Luck) -> int:
    count = int((found.known > 1).sum())
    if count:
        print(f"REFUSED {count} of {problem.name}: {kernel.name}, {luck.value}, {found.worst:.6g}")
    return count


if __name__ == "__main__":
    sys.exit(main())
