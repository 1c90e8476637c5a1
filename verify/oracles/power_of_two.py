"""Powers of two: V times 2^k makes O exactly 2^k times as large; Q times 2^a and K times 2^-a
change no bit of O and LSE."""

from __future__ import annotations

import math

from verify.judging.comparison import compare, excess
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits, failed
from verify.judging.power_scaling import SHORTEST, normal, powers, scaled, tamed, times, wide
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle


def judge(trial: Trial) -> Ruling:
    """One further run with all three scaled.  O is compared where it is a normal number both times;
    a kernel that does not repeat its bits is held to the bound of the scaled problem, and so is one
    that may have rounded anything to a short range.
    """
    p, found = trial.problem, powers(trial)
    other = trial.beside("power_of_two", p, inputs=scaled(trial, found))
    ruling = failed(other, other.first)
    if ruling is not None:
        return ruling
    before, after = trial.first, other.first
    assert before.out is not None
    assert after.out is not None
    factor = math.ldexp(1.0, found.values)
    what = f"q 2^{found.keys}, k 2^{-found.keys}, v 2^{found.values}"
    if not trial.declaration.contract.deterministic or (
        trial.declaration.undeclared and p.format.emin > SHORTEST
    ):
        truth = other.truth
        live = ~truth.empty
        bound = truth.out_bound.masked_fill(~live[..., None], math.inf)
        compared = compare(after.out, truth.out, bound, p.format_out)
        return Ruling(excess("power_of_two", "out", after.out, truth.out, bound, compared))
    asked = {"out": normal(before.out, factor, p.format_out)}
    pairs = [("out", times(before.out, factor), after.out)]
    if before.lse is not None and after.lse is not None:
        pairs.append(("lse", before.lse, after.lse))
        asked["lse"] = ~before.lse.isnan()
    return check_same_bits("power_of_two", what, pairs, asked)


def concerns(trial: Trial) -> bool:
    """Whether anything can be scaled; by descales only where bits are compared, since bounds know
    the problem's own."""
    return bool(powers(trial)) and (
        trial.declaration.contract.deterministic or trial.problem.descaling == "none"
    )


GROUP = Group(
    name="power_of_two",
    about="inputs times powers of two: results scale bit for bit",
    family="exact",
    distributions=("octaves", "small_integers"),
    adapt=tamed,
)

ORACLE = Oracle(
    name="power_of_two",
    group="power_of_two",
    catches=(
        "hidden absolute epsilons, clamps, flushing to zero, range checks, narrow intermediates"
    ),
    judge=judge,
    excludes=wide,
    concerns=concerns,
)
