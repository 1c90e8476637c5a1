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

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.dtypes import dtype_named
from verify.evidence import Finding
from verify.judging.comparison import compare, excess, quantisation, summary, ulps
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
    live = ~truth.empty
    measures: dict[str, float] = {"seqlen_kv": float(trial.problem.seqlen_kv)}
    output = trial.problem.format_out
    out = compare(run.out, truth.out, truth.out_bound, output)
    out = out.among(live[..., None])
    finding = excess("bound", "out", run.out, truth.out, truth.out_bound, out)
    measures |= summary("out", out, truth.out, truth.out_bound)
    measures |= ulps("out", out.error, (truth.out, truth.out_bound), live, output)
    if trial.problem.scaled_output is not None:
        measures |= quantisation("out", out.error, truth.out, live, output)
    if truth.best_out_bound is not None and bool(live.any()):
        positive = truth.best_out_bound > 0
        if bool(positive.any()):
            measures["bound_ratio"] = float(
                (truth.out_bound[positive] / truth.best_out_bound[positive]).median()
            )
    if finding is None:
        finding, found = judge_out(trial, run.out)
        measures |= found
    if run.lse is not None:
        natural = trial.natural_lse(run.lse)
        lse = compare(
            natural, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
        ).among(live)
        finding = finding or excess("bound", "lse", natural, truth.lse, truth.lse_bound, lse)
        if finding is None:
            finding, found = judge_lse(trial, run.lse)
            measures |= found
        measures |= summary("lse", lse, truth.lse, truth.lse_bound)
        if bool(live.any()):
            # near 0 an ulp is no useful unit: LSE is the sum of two larger terms
            size = truth.lse[live].abs().clamp(min=1.0)
            ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
            measures["lse_ulp"] = float((lse.error[live] / ulp).nan_to_num(nan=torch.inf).max())
    read: list[RowBlock] = []
    measures |= forward_measures(trial, read)
    # a case that fails certifies nothing
    power = forward_power(trial, out.error, read) if finding is None else {}
    return Ruling(finding, measures | power)


def judge_backward(trial: Trial) -> Ruling:
    """Check r <= 1 for every element, and that it is a rounding of what known numbers give.  The
    errors of the saved O and LSE are known and allowed for, if they are within their own bounds."""
    finding = None if trial.own_softmax else _saved(trial)
    if finding is not None:
        return Ruling(finding)
    truth, measures = trial.known_gradients, {"seqlen_kv": float(trial.problem.seqlen_kv)}
    known = KnownRoundings(trial)
    for number, (name, got) in enumerate(trial.first.outputs.items()):
        want, bound = getattr(truth, name), getattr(truth, f"{name}_bound")
        compared = compare(got, want, bound, trial.problem.format)
        measures |= summary(name, compared, want, bound)
        finding = finding or excess("gradient_bound", name, got, want, bound, compared)
        if finding is None:
            finding, found = known.judge(name, got)
            measures |= found
        if truth.best_bounds is not None and number == 0:
            measures |= _leniency(bound, truth.best_bounds[number])
    power = gradient_power(trial) if finding is None else {}
    return Ruling(finding, measures | gradient_measures(trial) | power)


def _saved(trial: Trial) -> Finding | None:
    """Return a finding if the saved O or LSE is outside its own bounds, else None."""
    saved, truth = trial.saved, trial.truth
    assert saved.out is not None
    assert saved.lse is not None
    live = ~truth.empty
    natural = torch.where(live, trial.natural_lse(saved.lse), 0.0)
    lse = truth.lse.nan_to_num(neginf=0.0)
    compared = compare(
        saved.out,
        truth.out,
        torch.where(live[..., None], truth.out_bound, torch.inf),
        trial.problem.format_out,
    )
    finding = excess("gradient_bound", "saved out", saved.out, truth.out, truth.out_bound, compared)
    compared = compare(natural, lse, truth.lse_bound, dtype_named("float32"))
    return finding or excess("gradient_bound", "saved lse", natural, lse, truth.lse_bound, compared)


def _leniency(bound: Tensor, best: Tensor) -> dict[str, float]:
    """Return the measure `bound_ratio`: the median of bound / best bound, if both are finite."""
    comparable = (best > 0) & best.isfinite() & bound.isfinite()
    return (
        {"bound_ratio": float((bound[comparable] / best[comparable]).median())}
        if bool(comparable.any())
        else {}
    )


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
