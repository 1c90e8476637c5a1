"""Counting: with Q = 0 every visible key weighs the same, so O = hits / visible and LSE = ln visible."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import EXP, LOG_ERROR, ULP
from verify.arithmetic.mma import unit_for
from verify.oracles import Oracle
from verify.tolerance.arithmetic import resolve
from verify.trial import Ruling, Trial, convict, first, place


def judge(trial: Trial) -> Ruling:
    """The counts come from the mask alone, in integers; only division, exponential and output rounding may err."""
    p, run, numerics = trial.problem, trial.first, trial.declaration.numerics
    assert run.out is not None
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    _, _, v = trial.expanded
    hits = seen.double() @ v.double().repeat_interleave(p.group, 1)
    visible = seen.sum(-1)
    live = visible > 0
    want = hits / visible.clamp(min=1)[..., None]
    output = p.format_out
    weight, logs = _weight_error(trial), torch.log(visible.clamp(min=1).double())
    rounding = (3 * ULP + weight + output.unit_roundoff + _divisor_error(trial, logs))[..., None]
    if numerics.normalised or numerics.normaliser == "lse":
        # P = 1 / visible is rounded before the product; un-normalised P = 1 is exact in every dtype, and so is its sum.
        probability = p.dtype if numerics.probability == "input" else numerics.probability
        rounding = rounding + dtype_named(probability).unit_roundoff + unit_for(trial.arch, probability).kappa(p.seqlen_kv)
    bound = want * rounding + output.smallest_subnormal / 2
    error = (run.out.double() - want).abs()
    bad = live[..., None] & ~(error <= bound)
    if bool(bad.any()):
        at = first(bad)
        got, expected = float(run.out[at]), float(want[at])
        message = (
            f"out is {got:.7g} at {place('out', at)}, should be {int(hits[at])} hits / {int(visible[at[:3]])} visible keys = "
            f"{expected:.7g}; {int(bad.sum())} of {bad.numel()} elements miscount"
        )
        return convict("counting", message, name="out", bad=bad, got=got, bound=float(bound[at]))
    if run.lse is None:
        return Ruling()
    lse = trial.natural_lse(run.lse)
    limit = LOG_ERROR * (1 + logs) + weight + ULP * (2 + logs)
    bad = live & ~((lse - logs).abs() <= limit)
    if not bool(bad.any()):
        return Ruling()
    at = first(bad)
    counted = math.exp(min(float(lse[at]), 700.0))
    message = (
        f"lse counts {counted:.6g} keys at {place('lse', at)}, should be {int(visible[at])}: got {float(lse[at]):.9g}, "
        f"should be {float(logs[at]):.9g}; {int(bad.sum())} of {bad.numel()} rows miscount"
    )
    return convict("counting", message, name="lse", bad=bad, got=float(lse[at]), bound=float(limit[at]))


def _weight_error(trial: Trial) -> float:
    """How far weights of equal keys may be apart: nothing says that exp(0) is 1, nor then the factor of a rescale, but where it
    was measured; and what merges parts by their LSE is no exp(0)."""
    numerics = trial.declaration.numerics
    names = {numerics.exp, numerics.rescale_exp or numerics.exp}
    if all(trial.arch in EXP[name].exact_at_integers for name in names) and not numerics.split_keys:
        return 2 * max(EXP[name].error for name in names)
    return math.expm1(2 * resolve(numerics, trial.config, trial.problem, trial.arch).exps)


def _divisor_error(trial: Trial, logs: Tensor) -> Tensor:
    """How far O is off where it was divided by a rounded LSE, and parts weighed by theirs: see `verify.tolerance.weights`."""
    numerics = trial.declaration.numerics
    uses = (numerics.normaliser == "lse") + 3 * numerics.split_keys  # of a part's, on either side, and of the whole
    return uses * (LOG_ERROR * (1 + logs) + 6 * ULP * logs)


ORACLE = Oracle(
    name="counting",
    group="counting",
    catches="every off-by-one in masks, windows, lengths and alignments; wrong LSE base; a lost or doubled key",
    judge=judge,
)
