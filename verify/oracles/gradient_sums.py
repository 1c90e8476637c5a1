"""Gradient sums: sum dV = sum dO, sum dK = 0, <dQ, Q> = <dK, K> and <dV, V> = <dO, O>, whatever the
scores are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.judging.findings import Ruling, convict, first
from verify.judging.gradient_invariants import GradientTensors, Invariant, invariants
from verify.judging.invariants import KNOWN, KNOWN_GRADIENTS, beyond
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem.visibility import measurable
from verify.tolerance.arithmetic import resolve
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients
from verify.variant import Declaration


def judge(trial: Trial) -> Ruling:
    """Each within its own slack, of norms and outputs alone, and within the sum of the elements'
    bounds."""
    p, declared = trial.problem, trial.declaration
    assert declared.gradients is not None
    q, k, v = trial.expanded
    results = trial.first.outputs
    given = GradientTensors(
        q, k, v, trial.dout, *trial.start, results["dq"], results["dk"], results["dv"]
    )
    forward = resolve(declared.numerics, trial.config, p, trial.arch)
    found = invariants(
        p, given, forward, resolve_gradients(declared.gradients, trial.config, p, trial.arch)
    )
    measures, verdict = {}, Ruling()
    for one in found:
        bounds = summed_bounds(trial, one)
        # A sum with an element of which nothing is asked may be NaN.
        slack = torch.minimum(one.slack, bounds).masked_fill(bounds == math.inf, math.inf)
        error = (one.left - one.right).abs()
        ratio = torch.where((error == 0) | (slack == torch.inf), 0.0, error / slack).nan_to_num(
            nan=torch.inf, posinf=torch.inf
        )
        bad = ~(ratio <= 1)
        measures[f"gradient_sums_{one.name}"] = float(ratio.max()) if ratio.numel() else 0.0
        if verdict.finding is None and bool(bad.any()):
            at = first(bad)
            left, right, most = (float(x[at]) for x in (one.left, one.right, slack))
            where = ", ".join(f"{axis}={i}" for axis, i in zip("bhd", at, strict=False))
            message = (
                f"{one.formula} does not hold at [{where}]: {left:.9g} and {right:.9g}, at most"
                f" {most:.4g} apart; {int(bad.sum())} of {bad.numel()} sums are wrong"
            )
            verdict = convict(
                "gradient_sums", message, name=one.name[:2], bad=bad, got=left, bound=most
            )
    return Ruling(verdict.finding, measures)


def summed_bounds(trial: Trial, one: Invariant) -> Tensor:
    """What the elements' own bounds add up to in that invariant, which holds exactly of the exact
    gradients.

    Infinite where an element may rightly be infinite.
    """
    p, truth = trial.problem, trial.gradients
    dq_bound, dk_bound, dv_bound = (
        bound.masked_fill(exact.abs() + bound >= p.format.overflow, math.inf)
        for exact, bound in (
            (truth.dq, truth.dq_bound),
            (truth.dk, truth.dk_bound),
            (truth.dv, truth.dv_bound),
        )
    )
    q, k, v = (x.double().abs() for x in trial.expanded)

    def fold(x: Tensor) -> Tensor:
        return x.reshape(p.batch, p.heads_kv, p.group, *x.shape[2:]).sum(2)

    if one.name == "dv":
        return dv_bound.sum(2)
    if one.name == "dk":
        return dk_bound.sum(2)
    if one.name == "dq":
        found = fold((q * dq_bound).sum((2, 3))) + (k * dk_bound).sum((2, 3))
    else:
        off = (
            (trial.start[0].double() - trial.truth.out)
            .abs()
            .masked_fill(trial.truth.empty[..., None], 0.0)
        )
        found = fold((trial.dout.double().abs() * off).sum((2, 3))) + (v * dv_bound).sum((2, 3))
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _applies(declaration: Declaration) -> str | None:
    if declaration.gradients is None:
        return "declares no gradients"
    known: tuple[str, ...] = (*KNOWN_GRADIENTS, "delta_of")
    if declaration.gradients.prescale == "sqrt":
        known = (*known, "prescale")
    return beyond(declaration.numerics, KNOWN) or beyond(declaration.gradients, known)


ORACLE = Oracle(
    name="gradient_sums",
    group="gradients",
    catches=(
        "delta of another row, rows or keys that are lost or counted twice, dQ and dK of different"
        " P; at any length"
    ),
    judge=judge,
    excludes=_applies,
    concerns=lambda trial: (
        trial.problem.seqlen_q > 0 and trial.problem.seqlen_kv > 0 and measurable(trial.problem)
    ),
    rank=30,
)
