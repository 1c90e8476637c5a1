"""`python -m tests.extremes`: judge every variant that runs here on problems at the edges of fp32's
range.

Problems are drawn as every campaign draws them, and those are kept that are `extreme`.  Prints one
line per variant, dtype and group of oracles, and each conviction with its replay command; exits 1
if there is one.  On a GPU the same command judges the variants that run there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from verify.campaign.judge import Judge
from verify.campaign.run import open_run
from verify.campaign.targets import Target
from verify.evidence import Verdict
from verify.evidence.explanation import explain
from verify.oracles import groups
from verify.problem import Problem
from verify.problem.sampling import draws
from verify.problem.strategies import EXTREME_SCALES

# draws at once, of which only some are taken: Hypothesis repeats an example with small changes
_ROUND = 40
_TAKEN = 6
_ROUNDS = 200  # a group whose problems are adapted to an ordinary scale may have no extreme one
DEFAULT_GROUPS = ("accuracy", "gradients")


def extreme(problem: Problem) -> bool:
    """Whether the scale or the scores are far from where models keep them."""
    return problem.distribution == "range_edges" or abs(problem.scale) in EXTREME_SCALES


def extremes(target: Target, wanted: int, seed: int = 0, pairs: int = 1 << 30) -> Iterator[Problem]:
    """Up to `wanted` different extreme problems of a target, in an order that depends on the seed
    alone.

    pairs: the most (query, key) pairs of a problem.
    """
    heard: set[str] = set()
    for number in range(seed * _ROUNDS, (seed + 1) * _ROUNDS):
        drawn = [problem for problem in draws(target.problems, _ROUND, number) if extreme(problem)]
        new = [p for p in drawn if p.name not in heard and p.pairs <= pairs]
        for problem in new[:: -(-len(new) // _TAKEN) or 1]:
            heard.add(problem.name)
            yield problem
            if len(heard) == wanted:
                return


@dataclass
class Line:
    """What one variant did in one group, in one dtype.  r: the largest error over bound; unasked:
    the mean share of elements whose bound is infinite."""

    variant: str
    dtype: str
    group: str
    cases: int = 0
    failing: int = 0
    r: float = 0.0
    unasked: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, verdicts: list[Verdict], failing: list[Verdict]) -> None:
        self.cases += 1
        self.failing += bool(failing)
        self.failures += [explain(verdict) for verdict in failing]
        measures = [
            (name, value) for verdict in verdicts for name, value in verdict.measures.items()
        ]
        self.r = max([self.r, *(value for name, value in measures if name.startswith("r_"))])
        shares = [value for name, value in measures if name.startswith("unasked_")]
        self.unasked += ((sum(shares) / len(shares) if shares else 0.0) - self.unasked) / self.cases

    @property
    def text(self) -> str:
        return (
            f"{self.variant:28} {self.dtype:14} {self.group:22} {self.cases:5} cases"
            f" {self.failing:4} failing   r {self.r:<8.3g} not asked {self.unasked:4.0%}"
            f" {self.seconds:7.1f} s"
        )


def judge_problems(judge: Judge, targets: list[Target], problems: Iterator[Problem]) -> Line:
    """Hear extreme problems of one variant, dtype and group, its configs in turn."""
    first = targets[0]
    line = Line(first.declaration.ref, first.dtype, first.group)
    begun = time.monotonic()
    for problem, number in zip(problems, count(), strict=False):
        verdicts = judge.judge(targets[number % len(targets)], problem)
        line.add(verdicts, judge.unexpected_failures(verdicts))
    line.seconds = time.monotonic() - begun
    return line


def main(arguments: list[str]) -> int:
    """Judge, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.extremes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="*", type=Path, help="kernel files; default: the collection")
    parser.add_argument(
        "--per-variant",
        type=int,
        default=100,
        help="problems per variant and group, over its dtypes",
    )
    parser.add_argument(
        "--group", action="append", choices=tuple(groups()), help="default: accuracy and gradients"
    )
    parser.add_argument("-k", default="", help="only variants whose name holds this")
    parser.add_argument("--dtype", default="", help="only inputs of this dtype")
    parser.add_argument("--seed", type=int, default=0, help="other problems for another number")
    parser.add_argument(
        "--pairs",
        type=int,
        default=1 << 30,
        help="only problems of so many (query, key) pairs at most",
    )
    parser.add_argument("--out", type=Path, help="write all of it as JSON")
    given = parser.parse_args(arguments)
    run = open_run("dev", given.files)
    judge = run.judge("extremes")
    lines = []
    try:
        for group in given.group or DEFAULT_GROUPS:
            found: dict[tuple[str, str], list[Target]] = {}
            for target in run.targets(group):
                if given.k in target.declaration.ref and given.dtype in ("", target.dtype):
                    found.setdefault((target.declaration.ref, target.dtype), []).append(target)
            for targets in found.values():
                wanted = -(-given.per_variant // len(targets[0].declaration.support.dtypes))
                problems = extremes(targets[0], wanted, given.seed, given.pairs)
                lines.append(judge_problems(judge, targets, problems))
                print(lines[-1].text, flush=True)
                for failure in lines[-1].failures:
                    print(f"\n{failure}\n", flush=True)
    finally:
        judge.close()
    if given.out is not None:
        given.out.write_text(
            json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8"
        )
    failing = sum(line.failing for line in lines)
    print(f"{sum(line.cases for line in lines)} cases, {failing} failing")
    return 1 if failing or not lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
