"""`python3 -m tests.log_sum_sweep`: many honest LSE against the bound of LSE = ln 2 (m + log2 l).

Emulated kernels that make their LSE so, in every dtype and distribution, with exponentials and
logarithms to nearest and with their largest errors (all up, all down, at random, against O), until
as many LSE are judged as asked for.  Then the worst problem of each is varied in its scale and
seed.  It fails where one exceeds its bound or is no rounding of what it may be, and prints one line
per arithmetic and dtype: rows, the largest error / bound, the largest part of the reach that one
needs, and the medians of the other bound over this one and of the numbers that are right.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass, replace

from tests.harness import sweeps
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.meta.tolerance.test_tolerance import truth_of
from verify.arithmetic.dtypes import dtype_named
from verify.judging.known_forward import natural_reach
from verify.judging.lattice import acceptable, explained
from verify.problem import Problem
from verify.problem.distributions import ordinary

SHAPES = (
    "hq=4,hkv=2,sq=60,skv=60,d=16,mask=causal",
    "sq=150,skv=70,d=32",
    "hq=2,sq=100,skv=17,d=64",
    "sq=200,skv=200,d=16,mask=window.90.0",
    "hq=8,sq=30,skv=3,d=8,scale=1.5",
    "sq=40,skv=400,d=64,mask=dense.50.3",
    "hq=2,sq=64,skv=33,d=24,softcap=20.0",
    "sq=100,skv=48,d=64,scale=-0.125",
    "sq=60,skv=100,d=128,scale=0.01",
)
_FP32 = dtype_named("float32")


def kernels() -> tuple[Kernel, ...]:
    """Arithmetics whose LSE is ln 2 (m + log2 l)."""
    online = Kernel("online, sm_90", flat_numerics(block_n=32, row_sum_lse="log2"))
    ascending = online.but(key_order="ascending", block_n=16)
    lanes = {"lanes": 4, "apart": True, "head_dim": "ascending"}
    kinds = [
        online,
        online.but(name="online, sm_80", arch="sm_80"),
        online.but(name="in order, four lanes", **lanes),
        online.but(name="in order, sm_80", arch="sm_80", **lanes),
        ascending.but(name="ascending"),
        ascending.but(name="descending, in order, four lanes", key_order="descending", **lanes),
        ascending.but(name="whole blocks first, lanes", key_order="whole_first", **lanes),
        ascending.but(name="ascending, in order, sm_80", arch="sm_80", block_n=8, **lanes),
        online.but(name="one block", block_n=0),
        online.but(name="factor made in fp32", scale_roundings=3),
        online.but(name="prescaled q", prescale="q"),
        online.but(name="scores in 16 bits", scores="input"),
        online.but(name="cubic exp2", exp="exp2_poly3", rescale_exp="ex2.approx"),
        online.but(name="lagging maximum", lag=8.0),
        online.but(name="maximum of a tile", maximum_rows=16),
        online.but(name="sum of rounded P", row_sum_of="rounded"),
        online.but(name="fp32", dtypes=("float32",), block_n=16),
        online.but(name="fp32 in order", dtypes=("float32",), **lanes),
        online.but(name="8 bits", probability_scale=256.0, promotion=32, dtypes=("float8_e4m3fn",)),
    ]
    errors = [
        replace(kind, name=f"{kind.name}, {way}", errors=way)
        for kind in kinds[2:9]
        for way in ("up", "down", "random")
    ]
    return (*kinds, *errors)


@dataclass(frozen=True)
class Judged:
    """Of the rows of one problem that see a key: the largest error / bound and part of the reach,
    and the medians of the other bound over this one and of the numbers that are right."""

    rows: int
    ratio: float
    lattice: float
    sharper: float
    numbers: float


def judged(problem: Problem, kernel: Kernel, luck: Luck) -> Judged:
    """One emulated forward, its LSE judged."""
    made = emulate(problem, kernel, luck)
    truth = truth_of(problem, kernel.numerics, kernel.arch)
    plain = truth_of(problem, kernel.but(row_sum_lse="any").numerics, kernel.arch)
    live = ~truth.empty & truth.lse_bound.isfinite()
    if not bool(live.any()):
        return Judged(0, 0.0, 0.0, 1.0, 1.0)
    got, want, bound = made.lse[live], truth.lse[live], truth.lse_bound[live]
    assert truth.lse_reach is not None
    middle, reach = natural_reach(want, truth.lse_reach[live])
    lattice = explained(got, middle, reach, _FP32)
    count = acceptable(middle, reach, _FP32).double()
    return Judged(
        int(live.sum()),
        float(((got.double() - want).abs() / bound).max()),
        float(lattice.max()),
        float((plain.lse_bound[live] / bound).median()),
        float(count.median()),
    )


def main(arguments: list[str] | None = None) -> int:
    """Judge as many rows as the command line asks for; 1 if one was refused."""
    asked = sweeps.options(
        __doc__,
        arguments,
        rows=(20_000, "of each arithmetic and dtype"),
        climb=(20, "variants of the worst problem"),
    )
    total, refused = sweeps.over(kernels(), asked, _swept)
    print(f"{total} rows, {refused} problems refused")
    return 1 if refused else 0


def _swept(kernel: Kernel, dtype: str, asked: argparse.Namespace) -> tuple[int, int]:
    counted = refused = 0
    best: tuple[float, Problem, Luck] | None = None
    found: list[Judged] = []

    def run(problem: Problem, luck: Luck) -> None:
        nonlocal counted, refused, best
        one = judged(problem, kernel, luck)
        counted += one.rows
        found.append(one)
        worst = max(one.ratio, one.lattice)
        if worst > 1:
            refused += 1
            print(f"REFUSED {problem.name}: {kernel.name}, {luck.value}: {one}", flush=True)
        if best is None or worst > best[0]:
            best = worst, problem, luck

    lucks = itertools.cycle(Luck)
    pairs = (p for turn in itertools.count() for p in itertools.product(ordinary(), SHAPES))
    for number, (distribution, shape) in enumerate(pairs):
        if counted >= asked.rows or number > 4000:
            break
        out = ",out=bfloat16" if "float8" in dtype else ""
        text = f"{shape},dtype={dtype}{out},dist={distribution},seed={number}"
        run(Problem.parse(text), next(lucks))
    for step in range(asked.climb):
        assert best is not None
        run(sweeps.nearby(best[1], step), best[2])
    with_rows = [one for one in found if one.rows]
    print(
        f"{kernel.name}, {dtype}: {counted} rows, {refused} refused,"
        f" r {max(one.ratio for one in with_rows):.3f}, lattice"
        f" {max(one.lattice for one in with_rows):.3f}, bound"
        f" {statistics.median(one.sharper for one in with_rows):.2f} times as sharp,"
        f" {statistics.median(one.numbers for one in with_rows):.0f} numbers right",
        flush=True,
    )
    return counted, refused


if __name__ == "__main__":
    sys.exit(main())
