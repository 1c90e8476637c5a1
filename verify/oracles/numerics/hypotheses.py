"""Claims: declared numerics, put to inputs on which a false claim shows.  One file per kind of
claim.

A probe emulates what the kernel would give under each of several arithmetics and looks which one it
gave.  A claim is false only if two things meet: O or LSE is outside the bound of the declared
arithmetic, and some other arithmetic explains it better. A kernel that is better than it says keeps
its claim, and the word that is observed shows the leniency.
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
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.tolerance import forward as tolerance

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
        """Whether the kernel is caught."""
        return self.worse and not self.ratio <= 1


def run_if_supported(
    trial: Trial, tag: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> Trial | None:
    """The trial of a probe whose first run is there; None where the support does not have the
    problem."""
    if trial.declaration.support.refusal(problem) is not None:
        return None
    return run_probe(trial, tag, problem, make_inputs(problem, q, k, v))


def exact_probabilities(trial: Trial) -> Truth:
    """The truth, with the bounds of the declared arithmetic where the rounding of P is exact."""
    return bounded(trial, probability=FLOAT32, probability_scale=1.0)


def bounded(trial: Trial, **changes: Any) -> Truth:
    """The truth, with the bounds of the declared arithmetic but for some of what
    `ForwardArithmetic` holds."""
    resolved = tolerance.resolve(
        trial.declaration.numerics, trial.config, trial.problem, trial.arch
    )
    return compute_truth(trial.problem, trial.expanded, [replace(resolved, **changes)], trial.clock)


def excess(trial: Trial, where: Tensor, truth: Truth | None = None, *, lse: bool = False) -> float:
    """The largest error over its bound, of O where `where` (its shape, boolean) says so, and of the
    LSE of all rows."""
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
    """The name of the prediction with the least mean distance to `got`; what is not finite, or
    farther away, counts `limit`."""

    def distance(value: Tensor) -> float:
        apart = (got - value).abs()
        same = (got == value) | (~got.isfinite() & ~value.isfinite())
        return float(torch.where(same, 0.0, apart.nan_to_num(nan=limit).clamp(max=limit)).mean())

    return min(possible, key=lambda name: distance(possible[name]))


def logit_difference(trial: Trial) -> Tensor:
    """ln(O[.., 1] / O[.., 0]): where V is one-hot, how much more key 1 weighs than key 0, (batch,
    heads_q, seqlen_q)."""
    out = result(trial.first).double()
    return torch.log(out[..., 1]) - torch.log(out[..., 0])
