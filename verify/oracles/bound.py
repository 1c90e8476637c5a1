"""Bound: each element of O and LSE differs from the fp64 reference by at most its own derived
bound; NaN and Inf must match.

The reference is attention in fp64. docs/tolerance.md derives the bound of each element from the
declared arithmetic. NaN and infinities must be in exactly the right elements. The oracle can judge
any distribution and any problem. empty_rows judges the rows without a key. If the kernel declares
the order of its blocks of keys, P is known once it is rounded: each element of O must then be a
rounding, to nearest, of what these numbers give, or of what a P in fp32 gives. If it declares how
the LSE is made of the maximum and the row sum, each LSE must be a rounding of what these give.

Backward: each element of dQ, dK and dV lies within the bounds of docs/tolerance-backward.md. The
truth is the gradients that follow from the saved O and LSE: the error of the saved tensors is
known, and the comparison allows for it. The saved tensors must be within their own bounds; a worse
forward excuses no gradient. Besides, each element must be a rounding of what P and dS give once
they are rounded, to nearest, as declared or less: these numbers are known, except near ties.

Premises: none. The reference computes every feature of a problem, and the bound counts its
roundings.
"""

from __future__ import annotations

from torch import Tensor

from references.row_blocks import RowBlock
from verify.evidence import Finding
from verify.judging.compared import compare_saved, results_of
from verify.judging.comparison import excess, quantisation
from verify.judging.findings import Ruling
from verify.judging.known_forward import judge_lse, judge_out
from verify.judging.known_roundings import KnownRoundings
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.statistics.forward import forward_measures
from verify.statistics.gradients import gradient_measures
from verify.statistics.power import forward_power
from verify.statistics.power_gradients import gradient_power


def judge(trial: Trial) -> Ruling:
    """Check r <= 1 for every element of O and LSE in rows that see a key; empty_rows judges the
    others."""
    run, truth = trial.first, trial.known_truth
    assert run.out is not None
    results = results_of(trial).tensors
    measures: dict[str, float] = {"seqlen_kv": float(trial.problem.seqlen_kv)}
    out = results["out"]
    finding = None
    if not out.worst <= 1:
        finding = excess("bound", "out", run.out, truth.out, truth.out_bound, out.comparison)
    measures |= out.measures
    if trial.problem.scaled_output is not None:
        measures |= quantisation(
            "out", out.comparison.error, truth.out, ~truth.empty, trial.problem.format_out
        )
    if truth.best_out_bound is not None and not bool(truth.empty.all()):
        best = truth.best_out_bound
        measures |= _leniency(truth.out_bound, best, (best > 0) & best.isfinite())
    if finding is None:
        finding, found = judge_out(trial, run.out, out.explained)
        measures |= found
    if run.lse is not None:
        lse = results["lse"]
        if finding is None and not lse.worst <= 1:
            natural = trial.natural_lse(run.lse)
            finding = excess("bound", "lse", natural, truth.lse, truth.lse_bound, lse.comparison)
        if finding is None:
            finding, found = judge_lse(trial, run.lse, lse.explained)
            measures |= found
        measures |= lse.measures
    read: list[RowBlock] = []
    measures |= forward_measures(trial, read)
    # a case that fails certifies nothing
    power = forward_power(trial, out.comparison.error, read) if finding is None else {}
    return Ruling(finding, measures | power)


def judge_backward(trial: Trial) -> Ruling:
    """Check r <= 1 for every element, and that it is a rounding of what known numbers give.  The
    errors of the saved O and LSE are known and allowed for, if they are within their own bounds."""
    results = results_of(trial)
    finding = None if results.saved <= 1 else _saved(trial)
    if finding is not None:
        return Ruling(finding)
    truth, measures = trial.known_gradients, {"seqlen_kv": float(trial.problem.seqlen_kv)}
    known = KnownRoundings(trial)
    for number, (name, got) in enumerate(trial.first.outputs.items()):
        want, bound = getattr(truth, name), getattr(truth, f"{name}_bound")
        own = results.tensors[name]
        measures |= own.measures
        if finding is None and not own.worst <= 1:
            finding = excess("gradient_bound", name, got, want, bound, own.comparison)
        if finding is None:
            finding, found = known.judge(name, got, own.explained)
            measures |= found
        if truth.best_bounds is not None and number == 0:
            best = truth.best_bounds[number]
            comparable = (best > 0) & best.isfinite() & bound.isfinite()
            measures |= _leniency(bound, best, comparable)
    power = gradient_power(trial) if finding is None else {}
    return Ruling(finding, measures | gradient_measures(trial) | power)


def _saved(trial: Trial) -> Finding | None:
    """Return a finding if the saved O or LSE is outside its own bounds, else None."""
    saved, truth = trial.saved, trial.truth
    assert saved.out is not None
    assert saved.lse is not None
    natural = trial.natural_lse(saved.lse)
    out, of_lse = compare_saved(truth, saved.out, natural, trial.problem.format_out)
    finding = excess("gradient_bound", "saved out", saved.out, truth.out, truth.out_bound, out)
    natural, lse = natural.masked_fill(truth.empty, 0.0), truth.lse.nan_to_num(neginf=0.0)
    return finding or excess("gradient_bound", "saved lse", natural, lse, truth.lse_bound, of_lse)


def _leniency(bound: Tensor, best: Tensor, comparable: Tensor) -> dict[str, float]:
    """Return the measure `bound_ratio`: the median of bound / best bound of those elements."""
    if not bool(comparable.any()):
        return {}
    return {"bound_ratio": float((bound[comparable] / best[comparable]).median())}


FORWARD = Oracle(
    name="bound",
    group="accuracy",
    catches="errors of O above honest rounding, wrong LSE, NaN and Inf in wrong elements",
    judge=judge,
    needs=frozenset(),
    rank=20,
)

BACKWARD = Oracle(
    name="gradient_bound",
    group="gradients",
    catches=(
        "errors of gradients above honest rounding: delta, scale, masks, head sums, NaN and Inf in"
        " wrong elements"
    ),
    judge=judge_backward,
    needs=frozenset(),
    rank=20,
)

ORACLES = (FORWARD, BACKWARD)
