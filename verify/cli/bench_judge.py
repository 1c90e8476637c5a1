"""The judge's own speed on fixed problems, for `verify bench suite`: what the bounds of a square
cost beside its reference, and how long a sequence takes of which no square of scores is made."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import environment
from verify.evidence import Recorder
from verify.problem import Problem
from verify.variant import Declaration

_REPEATS = 5
# Their launches take no time beside the judge's.
_VARIANTS = ("torch-flash", "torch-cpu-flash-16bit")


@dataclass(frozen=True)
class Square:
    """Problems of `group`; a GPU has `on_gpu` rows and keys, a CPU `on_cpu`.

    A CPU's long sequence has few rows.
    """

    group: str
    head_dim: int
    on_gpu: tuple[int, int]
    on_cpu: tuple[int, int]

    def problems(self, dtype: str) -> list[Problem]:
        """The problems, alike but for their values; the first one is a warm-up."""
        rows, keys = self.on_gpu if environment().device == "cuda" else self.on_cpu
        return [
            Problem(seqlen_q=rows, seqlen_kv=keys, head_dim=self.head_dim, dtype=dtype, seed=seed)
            for seed in range(_REPEATS + 1)
        ]


BOUNDED = Square("accuracy", 128, (8192, 8192), (2048, 2048))
LONG = Square("long", 64, (1 << 20, 1 << 20), (64, 1 << 17))


def lines(declarations: Sequence[Declaration]) -> Iterator[str]:
    """What was measured, a line each; none without a kernel whose launches are fast.

    declarations: of variants that run here.
    """
    found = [declaration for declaration in declarations if declaration.ref in _VARIANTS]
    if not found:
        return
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Recorder(Path(folder), "main"))
        try:
            yield _bounds(judge, found[0])
            yield _long(judge, found[0])
        finally:
            judge.close()


def _bounds(judge: Judge, declaration: Declaration) -> str:
    found = list(_judged(judge, declaration, BOUNDED))
    references = [steps["reference"] for _, _, steps in found]
    shares = [steps["bound"] / steps["reference"] for _, _, steps in found]
    return (
        f"bounds, {_size(found[0][0])}: {median(shares):.2f} times the reference's"
        f" {median(references):.3f} s ({_of(shares)})"
    )


def _long(judge: Judge, declaration: Declaration) -> str:
    found = list(_judged(judge, declaration, LONG))
    walls = [wall for _, wall, _ in found]
    return f"rows and invariants, {_size(found[0][0])}: {median(walls):.1f} s ({_of(walls)})"


def _judged(
    judge: Judge, declaration: Declaration, square: Square
) -> Iterator[tuple[Problem, float, dict[str, float]]]:
    """Each problem, its seconds of wall clock, and those of its steps.

    Raises RuntimeError for a failing one: its time says nothing.
    """
    dtype = declaration.support.dtypes[0]
    target = Target(declaration, declaration.configs[0], dtype, square.group)
    for number, problem in enumerate(square.problems(dtype)):
        begun = time.monotonic()
        verdicts = judge.judge(target, problem)
        wall = time.monotonic() - begun
        if any(verdict.finding is not None for verdict in verdicts):
            raise RuntimeError(f"{verdicts[-1].case} fails: verify run {declaration.path}")
        if number:
            yield problem, wall, dict(verdicts[-1].seconds)


def _size(problem: Problem) -> str:
    return f"{problem.seqlen_q:,} rows and {problem.seqlen_kv:,} keys, head_dim {problem.head_dim}"


def _of(values: Sequence[float]) -> str:
    return f"median of {len(values)}, {min(values):.2f} to {max(values):.2f}"
