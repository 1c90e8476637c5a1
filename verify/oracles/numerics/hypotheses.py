"""Claims: declared numerics that are tested on inputs which show a false claim.

A probe emulates the kernel's results under several arithmetics and finds the one that fits best.  A
claim is false only if O or LSE is outside the bound of the declared arithmetic and another
arithmetic fits better.  A kernel that is more precise than declared keeps its claim; the observed
word shows that the declaration is lenient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.measuring import make_inputs, result, run_probe
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.problem import Problem

FLOAT32 = dtype_named("float32")
NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Claim:
    """One declared item: the arithmetic that a kernel shows and the one that it declares, in the
    same words.

    ratio: the largest error in units of the declared arithmetic's bound.  worse: whether another
    arithmetic than the declared one (or a better one) explains the results best.
    """

    name: str
    word: str
    declared: str
    ratio: float
    worse: bool
    evidence: str = ""

    @property
    def false(self) -> bool:
        """Return whether the probe convicts the kernel."""
        return self.worse and not self.ratio <= 1


def run_if_supported(
    trial: Trial, tag: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> Trial | None:
    """Run a probe and return its trial; None if the problem is outside the support."""
    if trial.declaration.support.refusal(problem) is not None:
        return None
    return run_probe(trial, tag, problem, make_inputs(problem, q, k, v))


def exact_probabilities(trial: Trial) -> Truth:
    """Return the truth with the bounds of the declared arithmetic without the rounding of P."""
    return bounded(trial, probability=FLOAT32, probability_scale=1.0)


def bounded(trial: Trial, **changes: Any) -> Truth:
    """Return the truth with the bounds of the declared arithmetic after `changes` of fields of
    `ForwardArithmetic`."""
    return trial.truth_of(replace(trial.arithmetic.without_interval, **changes))


def excess(trial: Trial, where: Tensor, truth: Truth | None = None, *, lse: bool = False) -> float:
    """Return the largest error / bound of O in the elements `where` (booleans in O's shape) and, if
    `lse`, of the LSE of all rows."""
    truth = truth or trial.truth
    found = compare(
        result(trial.first), truth.out, truth.out_bound, trial.problem.format_out
    ).ratio[where]
    if lse and trial.first.lse is not None:
        natural = trial.natural_lse(trial.first.lse)
        found = torch.cat(
            [found, compare(natural, truth.lse, truth.lse_bound, FLOAT32).ratio.flatten()]
        )
    return float(found.max())


def nearest(got: Tensor, possible: Mapping[str, Tensor], limit: float) -> str:
    """Return the name of the prediction with the smallest mean distance to `got`; a distance counts
    at most `limit`, and `limit` if it is NaN."""

    def distance(value: Tensor) -> float:
        apart = (got - value).abs()
        same = (got == value) | (~got.isfinite() & ~value.isfinite())
        return float(torch.where(same, 0.0, apart.nan_to_num(nan=limit).clamp(max=limit)).mean())

    return min(possible, key=lambda name: distance(possible[name]))


def logit_difference(trial: Trial) -> Tensor:
    """Return ln(O[.., 1] / O[.., 0]), (batch, heads_q, seqlen_q): the logit of key 1 less that of
    key 0, if V is one-hot."""
    out = result(trial.first).double()
    return torch.log(out[..., 1]) - torch.log(out[..., 0])
