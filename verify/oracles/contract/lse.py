"""LSE: measure its base, sign, scale and parts, as the nearest of many hypotheses.

If the declared arithmetic is too coarse to tell the declared convention from another, nothing
contradicts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.judging.measuring import UNDECIDED, Measured, plain
from verify.judging.trial import Trial

# The hypotheses are computed from the products of the visible keys.
NEEDS = frozenset({Premise.LINEAR_SCORES, Premise.POSITION_FREE_SCORES, Premise.VISIBLE_MASS_ONLY})
_LN2 = math.log(2)
_MEANT = 1000.0  # times the tolerance
_DECLARED = {"natural": "natural", "base2": "base 2"}


@dataclass(frozen=True)
class Hypothesis:
    """One possible content of LSE, (rows that see a key,) in fp64, and the error that a correct
    kernel can have."""

    word: str
    value: Tensor
    tolerance: Tensor

    def holds(self, got: Tensor) -> bool:
        """Return whether all rows are within the tolerance."""
        return bool(((got - self.value).abs() <= self.tolerance).all())

    def distance(self, got: Tensor) -> float:
        """Return the largest error of a row in units of the tolerance."""
        apart = (got - self.value).abs()
        return float(
            torch.where(apart == 0, 0.0, apart / self.tolerance)
            .nan_to_num(nan=math.inf, posinf=math.inf)
            .max()
        )


def hypotheses(trial: Trial) -> list[Hypothesis]:
    """Return the hypotheses, conventions first, then mistakes, without those that no row tells from
    an earlier one, unless they are declared.

    A tolerance is the bound of LSE times the factor by which the hypothesis multiplies LSE.
    """
    p, truth = trial.problem, trial.truth
    q, k, _ = (tensor.double() for tensor in trial.expanded)
    raw = q @ k.repeat_interleave(p.group, 1).mT
    raw = raw.masked_fill(~p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv), -math.inf)
    raw = raw[~truth.empty]
    scaled, natural, bound = raw * p.scale, truth.lse[~truth.empty], truth.lse_bound[~truth.empty]
    top = scaled.amax(-1)
    logs = natural - top
    two = bound / _LN2 + 2.0**-23 * natural.abs() / _LN2
    scale = max(abs(p.scale), 1 / abs(p.scale)) if p.scale else 1.0
    named = {
        "natural": (natural, bound),
        "base 2": (natural / _LN2, two),
        "natural, negated": (-natural, bound),
        "base 2, negated": (-natural / _LN2, two),
        "the maximum alone": (top, bound),
        "the maximum alone, base 2": (top / _LN2, two),
        "the logarithm of the row sum alone": (logs, bound),
        "the logarithm of the row sum alone, base 2": (logs / _LN2, two),
        "the row sum": (logs.exp(), logs.exp() * bound * 2),
        "the maximum natural, the row sum base 2": (top + logs / _LN2, two),
        "the maximum base 2, the row sum natural": (top / _LN2 + logs, two),
        "without softmax_scale": (torch.logsumexp(raw, -1), bound * scale),
        "with softmax_scale twice": (torch.logsumexp(scaled * p.scale, -1), bound * scale),
        "natural, times softmax_scale": (natural * p.scale, bound * scale),
        "natural, divided by softmax_scale": (natural / (p.scale or 1.0), bound * scale),
    }
    found: list[Hypothesis] = []
    declared = _DECLARED.get(trial.declaration.contract.lse or "")
    for word, (value, tolerance) in named.items():
        if word == declared or all(
            bool(((value - h.value).abs() > tolerance + h.tolerance).any()) for h in found
        ):
            found.append(Hypothesis(word, value, tolerance))
    return found


def _nearest(possible: list[Hypothesis], got: Tensor) -> str:
    """Name the nearest hypothesis and its error, if that is below _MEANT tolerances."""
    distance, word = min((h.distance(got), h.word) for h in possible)
    return (
        f"{word}, but {distance:.3g} times as far off as is allowed"
        if distance < _MEANT
        else "something else"
    )


def measure(trial: Trial) -> list[Measured]:
    """Measure which hypothesis the raw LSE of live rows matches."""
    declared = trial.declaration.contract.lse
    if (
        declared is None
        or trial.first.lse is None
        or not plain(trial)
        or bool(torch.all(trial.truth.empty))
    ):
        return []
    got = trial.first.lse[~trial.truth.empty].double()
    possible = hypotheses(trial)
    matching = [h.word for h in possible if h.holds(got)]
    word = matching[0] if len(matching) == 1 else UNDECIDED if matching else _nearest(possible, got)
    at = int(got.abs().nan_to_num(nan=math.inf).argmax())
    values = ", ".join(f"{h.word} {float(h.value[at]):.6g}" for h in possible[:2])
    evidence = f"a row has {float(got[at]):.6g}, would be {values}"
    promised = _DECLARED[declared]
    return [
        Measured(
            name="LSE",
            word=word,
            declared=promised,
            contradicts=promised not in matching,
            evidence=evidence,
        )
    ]
