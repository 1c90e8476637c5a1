"""Bound: every element of O and LSE against fp64, within its own derived tolerance, NaN and Inf exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.evidence import Finding
from verify.oracles import Oracle
from verify.trial import Ruling, Trial, place


@dataclass(frozen=True)
class Comparison:
    """One tensor against its truth: error and ratio r = error / bound, elementwise (r = inf: NaN or Inf out of place)."""

    error: Tensor
    ratio: Tensor

    @property
    def worst(self) -> float:
        return float(self.ratio.max()) if self.ratio.numel() else 0.0


def compare(got: Tensor, want: Tensor, bound: Tensor, output: DType) -> Comparison:
    """Compare raw output (any dtype) with fp64 truth.  An infinity is right where truth and bound reach past overflow."""
    value = got.double()
    error = (value - want).abs()
    overflowed = value.isinf() & (want.abs() + bound >= output.overflow) & (value.sign() == want.sign())
    overflowed |= bound == torch.inf  # outside the declared arithmetic: anything goes
    error = torch.where(overflowed, 0.0, error)
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(value.isfinite() | overflowed, ratio, torch.inf)
    return Comparison(error, ratio)


def judge(trial: Trial) -> Ruling:
    """r <= 1 for every element of O and LSE; rows without a key are the business of the empty-row oracle."""
    run, truth = trial.first, trial.truth
    assert run.out is not None
    live = ~truth.empty
    measures: dict[str, float] = {"seqlen_kv": float(trial.problem.seqlen_kv)}
    output = dtype_named(trial.problem.dtype)
    out = compare(run.out, truth.out, truth.out_bound, output)
    out = Comparison(*(torch.where(live[..., None], part, 0.0) for part in (out.error, out.ratio)))
    finding = _finding("out", run.out, truth.out, truth.out_bound, out)
    if out.error.numel():
        at = int(out.error.nan_to_num(nan=torch.inf).argmax())
        measures["max_error"] = float(out.error.flatten()[at])
        measures["error_bound"] = float(truth.out_bound.flatten()[at])
        at = int(out.ratio.argmax())
        measures["worst_index"] = float(at)
        measures["worst_reference"], measures["worst_bound"] = (float(t.flatten()[at]) for t in (truth.out, truth.out_bound))
    measures["r_out"] = out.worst
    if truth.best_out_bound is not None and bool(live.any()):
        positive = truth.best_out_bound > 0
        if bool(positive.any()):
            measures["bound_ratio"] = float((truth.out_bound[positive] / truth.best_out_bound[positive]).median())
    if run.lse is not None:
        natural = trial.natural_lse(run.lse)
        lse = compare(natural, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32"))
        lse = Comparison(*(torch.where(live, part, 0.0) for part in (lse.error, lse.ratio)))
        finding = finding or _finding("lse", natural, truth.lse, truth.lse_bound, lse)
        measures["r_lse"] = lse.worst
        if bool(live.any()):
            size = truth.lse[live].abs().clamp(min=1.0)  # around 0 an ulp says nothing: LSE is the sum of two larger terms
            ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
            measures["lse_ulp"] = float((lse.error[live] / ulp).nan_to_num(nan=torch.inf).max())
    return Ruling(finding, measures)


def _finding(name: str, got: Tensor, want: Tensor, bound: Tensor, compared: Comparison) -> Finding | None:
    bad = ~(compared.ratio <= 1)
    count = int(bad.sum())
    if not count:
        return None
    at = int(compared.ratio.nan_to_num(nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), compared.ratio.shape))
    value, truth, limit = float(got[index]), float(want[index]), float(bound[index])
    ratio = float(compared.ratio[index])
    message = (
        f"{name} is off by {abs(value - truth):.4g}, the bound is {limit:.4g} (r = {ratio:.3g}): got {value:.9g}, "
        f"should be {truth:.9g} at {place(name, index)}; {count} of {bad.numel()} elements are out of bounds"
    )
    return Finding(
        oracle="bound", message=message, got=value, bound=limit, where=place(name, index), count=count, total=bad.numel()
    )


ORACLE = Oracle(
    name="bound",
    group="accuracy",
    catches="wrong values of any size above honest rounding, wrong LSE, NaN and Inf out of place",
    judge=judge,
    rank=20,
)
