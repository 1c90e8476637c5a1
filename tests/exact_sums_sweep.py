"""`python3 -m tests.exact_sums_sweep`: many honest forwards of `counting` and `gather`.

Every honest arithmetic of the tests of the bounds counts keys and gathers rows, in every dtype and
shape, with functions to nearest and with their largest errors, until as many elements of O are
judged as asked for.  It fails where the oracle convicts one, and prints one line per arithmetic and
oracle: elements, and the median bound of O and LSE beside those of the forward's own bound.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator

import torch

from tests.harness import sweeps
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, trial_of
from tests.meta.tolerance.test_tolerance import HONEST, suits
from tests.meta.tolerance.test_tolerance_narrow import HONEST as NARROW
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import counting, gather
from verify.problem import Problem, ProblemError
from verify.problem.known_answers import gather_possible

SHAPES = (
    "hq=2,sq=9,skv=33,d=64",
    "hq=4,hkv=2,sq=40,skv=40,d=16,mask=causal",
    "hq=2,sq=33,skv=200,d=32,mask=window.70.3",
    "sq=5,skv=100,d=128,scale=1.7",
    "sq=12,skv=30,d=16,mask=dense.50.3",
    "sq=3,skv=700,d=64",
    "sq=64,skv=64,d=40,dv=24,mask=causal",
)
_ORACLES = {"counting": counting.judge, "gather": gather.judge}


def arithmetics() -> tuple[Kernel, ...]:
    """Emulated kernels: those of the bounds' tests, merges, and divisions that are exact."""
    online = HONEST[0]
    more = (
        online.but(name="split", style="split", split_keys=True),
        online.but(name="split, parts in 16 bits", style="split", split_keys="input"),
        online.but(name="ascending, div.rn", key_order="ascending", division="div.rn"),
        online.but(name="descending", key_order="descending"),
        online.but(name="P in fp32", probability="float32", key_order="ascending"),
        *(online.but(name=f"online, {exp}", exp=exp) for exp in ("exp2_poly3", "expf", "exp2f")),
    )
    return (*HONEST, *more, *NARROW)


def trials(kernel: Kernel, dtype: str, oracle: str) -> Iterator[Trial]:
    """Trials of one emulated arithmetic, without end."""
    for number, (luck, shape) in enumerate(
        pair for _ in itertools.count() for pair in itertools.product(Luck, SHAPES)
    ):
        if not suits(kernel, shape):
            continue
        text = f"{shape},dtype={dtype},dist={oracle},seed={number}"
        try:
            problem = Problem.parse(text)
            if oracle == "gather" and gather_possible(problem) is not None:
                continue
        except ProblemError:
            continue
        trial = trial_of(problem, numerics=kernel.numerics)
        trial.arch = kernel.arch
        made = emulate(problem, kernel, luck)
        trial.launches["first"] = Launch(OK, "nan", {"out": made.out, "lse": made.lse})
        yield trial


def main(arguments: list[str] | None = None) -> int:
    """Judge as many elements as the command line asks for; 1 if one was refused."""
    asked = sweeps.options(__doc__, arguments, elements=(60_000, "of each arithmetic"))
    total, refused = sweeps.over(arithmetics(), asked, _swept)
    print(f"{total} elements, {refused} cases refused")
    return 1 if refused else 0


def _swept(kernel: Kernel, dtype: str, asked: argparse.Namespace) -> tuple[int, int]:
    total = refused = 0
    smallest = Problem.parse(f"sq=1,skv=1,d=8,dtype={dtype}")
    declaration = trial_of(smallest, numerics=kernel.numerics).declaration
    for oracle, judge in _ORACLES.items():
        if oracle == "gather" and gather.excludes(declaration):
            continue
        counted = 0
        ratios: dict[str, list[float]] = {"out": [], "lse": []}
        for trial in trials(kernel, dtype, oracle):
            if counted >= asked.elements:
                break
            out = trial.first.out
            assert out is not None
            counted += out.numel()
            finding = judge(trial).finding
            if finding is not None:
                refused += 1
                print(f"REFUSED {trial.problem.name}: {kernel.name}: {finding.message}")
            for name, ratio in sharper(trial, oracle).items():
                ratios[name].append(ratio)
        total += counted
        gains = ", ".join(f"{k} {statistics.median(v):.1f}" for k, v in ratios.items() if v)
        print(f"{kernel.name}, {dtype}, {oracle}: {counted} elements, {gains}", flush=True)
    return total, refused


def sharper(trial: Trial, oracle: str) -> dict[str, float]:
    """How many times as wide the forward's own bound is, O's and LSE's median."""
    live = ~trial.truth.empty
    if oracle == "counting":
        seen = trial.problem.mask.dense(*(trial.problem.shape_out[:3]), trial.problem.seqlen_kv)
        visible = seen.sum(-1)
        v = trial.expanded[2].double().repeat_interleave(trial.problem.group, 1)
        want = seen.double() @ v / visible.clamp(min=1)[..., None]
        _, out, lse = counting._bounds(trial, want, torch.log(visible.clamp(min=1).double()))
    else:
        truth = gather._truth(trial)
        out, lse = truth.out_bound, truth.lse_bound
        known = gather._lse_error(trial, truth.lse)
        lse = lse if known is None else torch.minimum(lse, known)
    pairs = {"out": (trial.truth.out_bound[live], out[live])}
    pairs["lse"] = (trial.truth.lse_bound[live], lse[live])
    found = {}
    for name, (old, new) in pairs.items():
        asked = (new > 0) & old.isfinite()
        if bool(asked.any()):
            found[name] = float((old[asked] / new[asked]).median())
    return found


if __name__ == "__main__":
    sys.exit(main())
