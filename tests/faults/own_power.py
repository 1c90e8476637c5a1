"""The smallest fault of each class of docs/power.md that this suite convicts in a single case:
`python -m tests.faults.own_power` prints a table.

The kernel is that of `tests.faults.rival_power`, FlashAttention-2's arithmetic with a row's own
maximum.  It declares the order in which it makes its sums.  A fault is convicted where an oracle
fails in a case of some distribution, under both signs of the fault; strengths lie on a grid.  Cases
in which the right kernel fails (its exponential is not that of a power of two) are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.faults.rival_power import FORWARD, ONE_SIGN, emulated
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.reference_kernel import Hand, tried_by
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import bound, counting, dyadic, gather
from verify.problem import Problem
from verify.problem.distributions import ordinary

CLASSES = (
    *("scale", "exponent", "lse", "key", "out", "element"),
    *("dq", "dk", "dv", "read_lse", "delta", "ds_pair"),
)
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ("hq=2,hkv=2,sq=48,skv=80,d=64", "hq=1,hkv=1,sq=12,skv=16,d=16")
GRID = 8  # strengths in a decade
DECADES = 8
EXACT: Mapping[str, Callable[[Trial], Ruling]] = {
    "counting": counting.judge,
    "gather": gather.judge,
    "dyadic": dyadic.judge,
}
_SUMS = {"block_m": 0, "block_n": 0}
_ORDERS = {"head_dim": "ascending", "keys": "ascending", "rows": "ascending"}
_NUMERICS = flat_numerics(block_n=0, key_order="ascending", order_head_dim="ascending")


@dataclass(frozen=True)
class Faulty(Hand):
    """The emulated kernel with a fault of a class and a strength."""

    fault: str = ""
    strength: float = 0.0

    def forward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """out and the natural lse."""
        fault = self.fault if self.fault in FORWARD else FORWARD[0]
        return emulated(p, dict(given), fault, self.strength * (fault == self.fault))

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """dq, dk and dv."""
        found = emulated(p, dict(given), self.fault, self.strength)
        return {name: found[name] for name in ("dq", "dk", "dv")}


def trial(problem: Problem, fault: str, strength: float) -> Trial:
    """A case of the kernel with that fault."""
    entry = "forward" if fault in FORWARD else "backward"
    made = tried_by(
        Faulty(fault=fault, strength=strength),
        problem,
        entry,
        numerics=_NUMERICS,
        gradients=flat_gradients(**_SUMS, **_ORDERS),
        entries=("forward", "backward"),
    )
    made.arch = "sm_90"
    return made


def cases(dtype: str) -> list[Problem]:
    """Ordinary cases, one of each distribution."""
    return [
        Problem.parse(f"{SHAPES[seed % len(SHAPES)]},dtype={dtype},dist={distribution},seed={seed}")
        for seed, distribution in enumerate(ordinary())
    ]


def convicted(problem: Problem, fault: str, strength: float) -> bool:
    """Whether the oracles of that case's distribution convict the kernel with the fault."""
    case = trial(problem, fault, strength)
    if case.entry == "backward":
        return bound.judge_backward(case).finding is not None
    judge = EXACT.get(problem.distribution, bound.judge)
    return judge(case).finding is not None


def smallest(problems: Sequence[Problem], fault: str) -> tuple[float, str] | None:
    """The smallest strength of the grid that is convicted under both signs, and the distribution
    that shows it; None if no strength is."""
    problems = [problem for problem in problems if not convicted(problem, fault, 0.0)]
    found = []
    for sign in (1,) if fault in ONE_SIGN else (1, -1):
        best, where = -1, ""
        for problem in problems:
            reached = _farthest(partial(_fails, problem, fault, sign), best)
            if reached > best:
                best, where = reached, problem.distribution
        if best < 0:
            return None
        found.append((10 ** (-best / GRID), where))
    return max(found)


def _fails(problem: Problem, fault: str, sign: int, at: int) -> bool:
    return convicted(problem, fault, sign * 10 ** (-at / GRID))


def _farthest(fails: Callable[[int], bool], known: int) -> int:
    """The last number beyond `known` that fails, by bisection; `known` if the next one does not."""
    if not fails(known + 1):
        return known
    low, high = known + 1, GRID * DECADES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fails(middle) else (low, middle - 1)
    return low


def row(fault: str, dtype: str) -> str:
    """A line of the table: by ordinary cases, and by exact ones."""
    ordinary_cases = cases(dtype)
    cells = [smallest(ordinary_cases, fault)]
    if fault in FORWARD:
        exact = [ordinary_cases[0].but(distribution=name) for name in EXACT]
        cells.append(smallest(exact, fault))
    said = (f"{cell[0]:.1e} ({cell[1]})" if cell else "–" for cell in cells)
    return " | ".join((fault, dtype, *said))


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=CLASSES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for dtype in asked.dtype or DTYPES:
        for fault in asked.only or CLASSES:
            print(row(fault, dtype), flush=True)


if __name__ == "__main__":
    main()
