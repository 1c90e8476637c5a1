"""Bound: every element of O and LSE against fp64, within its own derived tolerance, NaN and Inf
exact."""

from __future__ import annotations

import torch

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import Comparison, compare, excess, summary
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.statistics.forward import forward_measures


def judge(trial: Trial) -> Ruling:
    """r <= 1 for every element of O and LSE; rows without a key are the business of the empty-row
    oracle."""
    run, truth = trial.first, trial.truth
    assert run.out is not None
    live = ~truth.empty
    measures: dict[str, float] = {"seqlen_kv": float(trial.problem.seqlen_kv)}
    output = trial.problem.format_out
    out = compare(run.out, truth.out, truth.out_bound, output)
    out = Comparison(*(torch.where(live[..., None], part, 0.0) for part in (out.error, out.ratio)))
    finding = excess("bound", "out", run.out, truth.out, truth.out_bound, out)
    measures |= summary("out", out, truth.out, truth.out_bound)
    if truth.best_out_bound is not None and bool(live.any()):
        positive = truth.best_out_bound > 0
        if bool(positive.any()):
            measures["bound_ratio"] = float(
                (truth.out_bound[positive] / truth.best_out_bound[positive]).median()
            )
    if run.lse is not None:
        natural = trial.natural_lse(run.lse)
        lse = compare(
            natural, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
        )
        lse = Comparison(*(torch.where(live, part, 0.0) for part in (lse.error, lse.ratio)))
        finding = finding or excess("bound", "lse", natural, truth.lse, truth.lse_bound, lse)
        measures |= summary("lse", lse, truth.lse, truth.lse_bound)
        if bool(live.any()):
            # around 0 an ulp says nothing: LSE is the sum of two larger terms
            size = truth.lse[live].abs().clamp(min=1.0)
            ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
            measures["lse_ulp"] = float((lse.error[live] / ulp).nan_to_num(nan=torch.inf).max())
    return Ruling(finding, measures | forward_measures(trial))


ORACLE = Oracle(
    name="bound",
    group="accuracy",
    catches="wrong values of any size above honest rounding, wrong LSE, NaN and Inf out of place",
    judge=judge,
    rank=20,
)
