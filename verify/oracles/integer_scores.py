"""Integer scores: Q K^T is exact in any order, so the bounds of O and LSE contain no score error
except that of the scale.

Q and K are sparse integers in [-2, 2], with +x and -x at two elements of head_dim, one in each
half, and x up to 2^21 (2^11 in 8 bits). Partial sums are large, scores are small, and all are
integers below the limit of any unit. With F fraction bits of the largest term and p + 1 bits of a
result, integers add up exactly, in any order, while sum |q k| < 2^min(F, p + 1): 2^24 on sm_80 and
later, 2^23 on sm_70, 2^13 in the 8-bit units of sm_89 and sm_90, and 2^11 for an fp16 accumulator,
which the second distribution (`small_integers`) is for. If the kernel supports any scale, the scale
is a power of four, so that q s and q sqrt(s), k sqrt(s) are exact too. They are not exact if an
exponential in base 2 also multiplies them by log2 e.

O and LSE must be within the bound that remains with kappa = 0 in Q K^T. The oracle catches
accumulators that are narrower than declared (one of 13 bits passes the element bound of O on normal
data), a lost tail of head_dim, and exchanged fragments.

Premises: the products of integers are added before any factor (factors_by_head). The reference
computes everything after the exact sums.
"""

from __future__ import annotations

import math
from dataclasses import replace

from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare, excess
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.tolerance.exact_sums import exact_below, exact_unit
from verify.tolerance.forward import ForwardArithmetic
from verify.variant import Support


def rescaled(problem: Problem, support: Support) -> Problem:
    """Give the problem a scale that is a power of four, if the support has any scale: multiplying
    by it, or both operands by its square root, is exact."""
    if support.scales == "default":
        return problem
    power = 4.0 ** round(math.log(abs(problem.scale) or problem.head_dim**-0.5, 4))
    return problem.but(softmax_scale=math.copysign(power, problem.scale))


def _exact_scores(trial: Trial) -> ForwardArithmetic:
    """Return the declared arithmetic with an exact Q K^T."""
    arithmetic = trial.arithmetic.without_interval
    return replace(
        arithmetic,
        scores=exact_unit(arithmetic.scores),
        operand_roundings=0.0,
        in_order=False,
    )


# Exponentials of base e.  For one of base 2, operands can be multiplied by the scale times log2(e),
# which is no power of two.
_BASE_E = ("expf", "__expf", "vexp", "exp_u20", "fexp_u20")


def concerns(trial: Trial) -> bool:
    """Return whether the sums are exact: small enough for the unit, with operands multiplied only
    by a power of two."""
    p = trial.problem
    q, k, _ = trial.expanded
    if not q.numel() or not k.numel():
        return True
    unit = trial.arithmetic.scores
    norm_q, norm_k = (x.double().norm(dim=-1).amax(-1) for x in (q, k))
    # at least as large as any sum of |q k|
    largest = float((norm_q * norm_k.repeat_interleave(p.group, 1)).max())
    fraction, exponent = math.frexp(abs(p.scale))
    numerics = trial.declaration.numerics
    power = fraction == 0.5 and numerics.softmax.exp in _BASE_E
    exact_factor = {"none": True, "q": power, "sqrt": power and exponent % 2 == 1}
    return largest < exact_below(unit) and exact_factor[numerics.products.prescale]


def exact_truth(trial: Trial) -> Truth:
    """Return reference and bounds for exact scores, computed once per trial."""
    return trial.noted("integer_scores", lambda trial: trial.truth_of(_exact_scores(trial)))


def judge(trial: Trial) -> Ruling:
    """Check O and LSE as `bound` does, within bounds without the errors of Q K^T."""
    run, truth = trial.first, exact_truth(trial)
    assert run.out is not None
    live = ~truth.empty
    pairs = [
        ("out", run.out, truth.out, truth.out_bound, trial.problem.format_out, live[..., None])
    ]
    if run.lse is not None:
        natural, want = trial.natural_lse(run.lse), truth.lse.nan_to_num(neginf=0.0)
        pairs.append(("lse", natural, want, truth.lse_bound, dtype_named("float32"), live))
    finding, measures = None, {}
    for name, got, want, bound, dtype, asked in pairs:
        compared = compare(got, want, bound.masked_fill(~asked, math.inf), dtype)
        finding = finding or excess("integer_scores", name, got, want, bound, compared)
        measures[f"exact_scores_r_{name}"] = compared.worst
    return Ruling(finding, measures)


GROUP = Group(
    name="integer_scores",
    about=(
        "integers in Q and K whose partial sums are large and whose scores are small, all exact"
    ),
    family="exact",
    distributions=("integer_scores", "small_integers"),
    adapt=rescaled,
)

ORACLE = Oracle(
    name="integer_scores",
    group="integer_scores",
    catches="narrow accumulators of Q K^T, a lost tail or swapped fragments of head_dim",
    judge=judge,
    needs=frozenset({Premise.FACTORS_BY_HEAD}),
    concerns=concerns,
)
