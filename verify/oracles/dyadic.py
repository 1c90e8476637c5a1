"""Dyadic: integer scores and a scale of ln 2 make every weight a power of two, so O is one division
and one rounding.

s = ln 2, and the scores are integers in [-4, 4]: every weight is a power of two, at least 2^-8 of
the row's largest. float32(ln 2 log2 e) is 1, and so is the product of float32(ln 2) and
float32(log2 e) in fp32. So a kernel that scales by one factor, rounded once, and uses an
exponential in base 2 has integer exponents, exact differences and, if its exponential is exact at
integers, exact weights in every dtype of P. V holds integers in [-4, 4): P V, the row sum and the
rescales are exact as long as sum P |V| 2^8 stays below the limit of integer_scores. O = sum P V /
sum P is then one division (5 u) and one rounding: it must lie between the values to which the ends
of that interval round. LSE = ln 2 (m + log2 l) to fp32 rounding. One element of head_dim makes the
scores rise or fall with the key, so that the running maximum changes.

No document says whether an exponential is exact at integers. ex2.approx and exp2f were measured on
an H100, at every integer from -126 to 127 (`exact_at_integers` in
`verify/arithmetic/instructions.py`). On sm_90 therefore no error of P is allowed, an error of one
ulp in one weight shows if weights cancel, and the slack of O is only the division and one rounding.
On other arches, and in Triton's interpreter, which uses numpy's exp2, the exponential's error is
allowed for each key and rescale, and also the errors of the sums, which are then not exact; a
16-bit O is still determined except near ties. An O in 8 bits is the rounded and cut multiple of
these numbers, by one more rounding in fp32.

The oracle catches exponentials of low precision, fp16 accumulators, lost rescales, mixed bases, and
outputs that are truncated or rounded twice, which no bound shows. It does not judge kernels that
use base e, scale with several roundings (other than descales, which are powers of two here),
normalise P, or merge parts by a rounded LSE.

Premises: scores are integers times ln 2 (linear_scores, position_free_scores) whose products are
summed as integers (factors_by_head), only the weights of visible keys are added up
(visible_mass_only, rows_average_values), and O is rounded once, after a known factor at most
(known_output).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.instructions import LOG_ERROR, exp_error_at_integers
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.invariants import KNOWN, beyond
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.known_answers import DYADIC_RANGE
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.exact_sums import exact_below
from verify.tolerance.resolution import resolve
from verify.tolerance.scaled_output import stored, stored_ends
from verify.variant import Declaration, Support

_BASE_2 = ("ex2.approx", "exp2f")


@dataclass(frozen=True)
class Answer:
    """The exact O (batch, heads_q, seqlen_q, head_dim_v) and LSE (batch, heads_q, seqlen_q) in
    fp64, their allowed errors before the last rounding, and the rows that see a key."""

    out: Tensor
    slack: Tensor
    lse: Tensor
    lse_slack: Tensor
    live: Tensor


def answer(trial: Trial) -> Answer:
    """Return the exact answer, from sums of powers of two.  The slack is that of the exponential,
    if it errs at integers, and of the division."""
    p, numerics = trial.problem, trial.declaration.numerics
    a = resolve(numerics, trial.config, p, trial.arch)
    q, k, v = (x.double() for x in trial.expanded)
    k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    scores = (q @ k.mT * round(p.scale / math.log(2))).masked_fill(~seen, -math.inf)
    live = seen.any(-1)
    top = scores.amax(-1) if p.seqlen_kv else scores.new_zeros(scores.shape[:-1])
    top = torch.where(live, top, 0.0)
    weights = torch.exp2(scores - top[..., None])
    total = torch.where(live, weights.sum(-1), 1.0)
    out, carried = (weights @ x / total[..., None] for x in (v, v.abs()))
    # without descales
    stored = trial.inputs.v.expand(p.shape_v).double().abs().repeat_interleave(p.group, 1)
    # Weights are multiples of 2^-DYADIC_RANGE of the row's largest, for any running maximum: they
    # are exact while they and their sums fit into a significand.
    exp = exp_error_at_integers(numerics.softmax.exp, trial.arch)
    each = math.expm1(-a.blocks * math.log1p(-exp))
    sums = weights.sum(-1) * 2.0**DYADIC_RANGE >= 2.0**24
    ls = relative(p.seqlen_kv + a.blocks, U) * (sums | (each > 0))
    coarse = a.probability_roundoff * (each >= a.probability_roundoff / 2)
    terms = (
        (1 + each)
        * (1 + coarse)
        * (1 + a.values.kappa(p.seqlen_kv))
        * (1 + relative(2 * a.blocks, U))
    ) - 1
    inexact = (weights @ stored * 2.0**DYADIC_RANGE >= exact_below(a.values)) | (each > 0)
    missed = terms * inexact * carried
    row = ((1 + each) * (1 + ls) - 1)[..., None]
    slack = (missed + row * out.abs()) / (1 - row)
    slack = slack + relative(a.division + a.output_roundings, U) * (out.abs() + slack)
    logs = torch.log(total)
    lse = math.log(2) * top + logs
    sizes = U * (8 * math.log(2) * top.abs() + 4 * lse.abs() + 2 * logs) + LOG_ERROR * (1 + logs)
    return Answer(out, slack, lse, row[..., 0] / (1 - row[..., 0]) + sizes, live)


def judge(trial: Trial) -> Ruling:
    """Check that some number within the slack rounds to O, and that LSE is exact up to fp32
    rounding."""
    p, run, want = trial.problem, trial.first, answer(trial)
    assert run.out is not None
    low, high = stored_ends(want.out, want.slack, p.format_out, p.scaled_output)
    got = run.out.double()
    bad = want.live[..., None] & ~((got >= low) & (got <= high))
    if bool(bad.any()):
        at = first(bad)
        exact = stored(want.out, p.scaled_output)
        message = (
            f"out is {float(got[at]):.9g} at {place('out', at)}, should be"
            f" {float(exact[at]):.9g}, rounded to {p.dtype_out}: all weights are"
            f" powers of two; {int(bad.sum())} of {bad.numel()} elements are wrong"
        )
        return convict(
            "dyadic", message, name="out", bad=bad, got=float(got[at]), bound=float(want.slack[at])
        )
    if run.lse is None:
        return Ruling()
    natural = trial.natural_lse(run.lse)
    bad = want.live & ~((natural - want.lse).abs() <= want.lse_slack)
    if not bool(bad.any()):
        return Ruling()
    at = first(bad)
    message = (
        f"lse is {float(natural[at]):.9g} at {place('lse', at)}, should be"
        f" {float(want.lse[at]):.9g} within {float(want.lse_slack[at]):.3g}; {int(bad.sum())} of"
        f" {bad.numel()} rows are wrong"
    )
    return convict(
        "dyadic",
        message,
        name="lse",
        bad=bad,
        got=float(natural[at]),
        bound=float(want.lse_slack[at]),
    )


def _ln_2(problem: Problem, support: Support) -> Problem:
    return problem.but(softmax_scale=math.copysign(math.log(2), problem.scale))


def _applies(declaration: Declaration) -> str | None:
    numerics, support = declaration.numerics, declaration.support
    # float32(ln 2 * log2 e) is 1, and so is the product of both factors in fp32; descales multiply
    # it by powers of two.
    factors = 2 * (set(support.descalings) != {"none"})
    reasons = {
        f"declares {numerics.softmax.exp}, no exponential in base 2": numerics.softmax.exp
        not in _BASE_2,
        "does not declare that it scales by one factor, rounded once": (
            numerics.softmax.scale_roundings - factors != 1
        ),
        f"declares {numerics.products.prescale} to be scaled before the product": (
            numerics.products.prescale != "none"
        ),
        "declares 16-bit scores": numerics.softmax.scores != "float32",
        "declares P to be normalised before the product": (
            numerics.output.normalised or numerics.output.normaliser != "sum"
        ),
        "merges parts by a rounded LSE": numerics.output.split_keys,
        "takes the default scale only": support.scales == "default",
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or beyond(
        numerics, KNOWN
    )


GROUP = Group(
    name="dyadic",
    about="integer scores, a scale of ln 2 and integers in V: every weight is a power of two",
    family="exact",
    distributions=("dyadic",),
    adapt=_ln_2,
)

ORACLE = Oracle(
    name="dyadic",
    group="dyadic",
    catches=(
        "exponentials, sums and accumulators of low precision, lost rescales, mixed bases, outputs"
        " that are truncated or rounded twice"
    ),
    judge=judge,
    excludes=_applies,
    needs=frozenset(
        {
            Premise.LINEAR_SCORES,
            Premise.POSITION_FREE_SCORES,
            Premise.FACTORS_BY_HEAD,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
            Premise.KNOWN_OUTPUT,
        }
    ),
)
