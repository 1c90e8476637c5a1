"""Counting: with Q = 0 all visible keys have equal weights, so O = hits / visible and LSE = ln
visible.

V[:, 0] = 1, and V[j, c] = 1 where j = c - 1 modulo the rest. The oracle counts the hits and the
visible keys from the mask, in integers.

If exp(0) was measured to be 1, P is not normalised and nothing is merged, then all sums are exact,
and only the division, the exponential and the rounding of the output can err. Otherwise the bounds
of docs/tolerance.md hold, with u_P = 0 if P can only be rounded to 1. The bounds are needed for
three reasons: nothing guarantees that exp(0) = 1; tf32 cuts a weight just below 1 by 2^-11 and a
normalised 1 / visible by up to 2^-10; an LSE that divides P is rounded.

An O in 8 bits is the rounded and cut multiple of hits / visible. Where the sums are exact, only the
numbers between those to which the ends of the error of O in fp32 round are right: mostly one.

The oracle catches off-by-one errors in masks, windows, lengths and alignments, and a wrong base of
LSE.

Premises: with q = 0 all scores are 0 (norm_bounded_scores), the weights of the visible keys
(visible_mass_only) add up to 1 (rows_average_values), the hits of all keys are added before any
factor (factors_by_head), and O is rounded once, after a known factor at most (known_output).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.instructions import EXP, LOG_ERROR, ULP
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.integer_scores import exact_below
from verify.oracles.numerics.hypotheses import exact_probabilities
from verify.problem.visibility import intervals
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.resolution import resolve
from verify.tolerance.scaled_output import stored, stored_ends


def judge(trial: Trial) -> Ruling:
    """Compare O and LSE with integer counts from the mask; only division, exponential and output
    rounding may err."""
    run = trial.first
    assert run.out is not None
    hits, visible = _counts(trial)
    live = visible > 0
    want = hits / visible.clamp(min=1)[..., None]
    logs = torch.log(visible.clamp(min=1).double())
    stores, bound, limit = _bounds(trial, want, logs)
    # any value passes where the bound is infinite
    error = (run.out.double() - stores).abs().nan_to_num(nan=math.inf)
    bad = live[..., None] & ~(error <= bound)
    if bool(bad.any()):
        bad &= ~beyond_arithmetic(trial)[..., None]
    if bool(bad.any()):
        at = first(bad)
        got, expected = float(run.out[at]), float(stores[at])
        message = (
            f"out is {got:.7g} at {place('out', at)}, should be {int(hits[at])} hits /"
            f" {int(visible[at[:3]])} visible keys = {expected:.7g}; {int(bad.sum())} of"
            f" {bad.numel()} elements miscount"
        )
        return convict("counting", message, name="out", bad=bad, got=got, bound=float(bound[at]))
    if run.lse is None:
        return Ruling()
    lse = trial.natural_lse(run.lse)
    bad = live & ~((lse - logs).abs().nan_to_num(nan=math.inf) <= limit)
    if bool(bad.any()):
        bad &= ~beyond_arithmetic(trial)
    if not bool(bad.any()):
        return Ruling()
    at = first(bad)
    counted = math.exp(min(float(lse[at]), 700.0))
    message = (
        f"lse counts {counted:.6g} keys at {place('lse', at)}, should be {int(visible[at])}: got"
        f" {float(lse[at]):.9g}, should be {float(logs[at]):.9g}; {int(bad.sum())} of {bad.numel()}"
        " rows miscount"
    )
    return convict(
        "counting", message, name="lse", bad=bad, got=float(lse[at]), bound=float(limit[at])
    )


def _counts(trial: Trial) -> tuple[Tensor, Tensor]:
    """Return what each row adds up of V, fp64 like O, and how many keys it sees; exact, because the
    sums are of integers times a factor of few bits."""
    p = trial.problem
    v = trial.expanded[2].double().repeat_interleave(p.group, 1)
    found = intervals(p)
    if found is None:
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        return seen.double() @ v, seen.sum(-1)
    low, high = (x[:, None].expand(p.batch, p.heads_q, p.seqlen_q) for x in found)
    running = torch.nn.functional.pad(v, (0, 0, 1, 0)).cumsum(2)
    ends = (running.take_along_dim(x[..., None], 2) for x in (low, high))
    return -next(ends) + next(ends), high - low


def _bounds(trial: Trial, want: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is stored of O, and the allowed errors of that and of LSE.

    If all weights and all rescale factors are 1, their sums are exact, and O is one division.
    exp(0) is known to be 1 only if it was measured; the factors that merge parts by their LSE are
    not exp(0).  Otherwise the forward's own bounds hold, without the rounding of P if P can only be
    rounded to 1.
    """
    p, numerics = trial.problem, trial.declaration.numerics
    a = resolve(numerics, trial.config, p, trial.arch)
    names = {numerics.softmax.exp, numerics.softmax.rescale_exp or numerics.softmax.exp}
    # P is exp(0), times a power of two
    apart = not (a.normalised or a.by_lse or a.excess or a.columns)
    measured = (
        apart and not a.merged and all(trial.arch in EXP[name].exact_at_integers for name in names)
    )
    if measured and a.values.accumulator == "float32" and p.seqlen_kv < exact_below(a.values):
        error = 2 * max(EXP[name].error for name in names)
        limit = LOG_ERROR * (1 + logs) + error + ULP * (2 + logs)
        if p.scaled_output is not None:
            before = want * (3 * ULP + error + relative(a.output_roundings, U))
            low, high = stored_ends(want, before, p.format_out, p.scaled_output)
            return (low + high) / 2, (high - low) / 2, limit
        rounding = 3 * ULP + error + a.output.unit_roundoff
        return want, want * rounding + a.output.smallest_subnormal / 2, limit
    # Just below 1, the spacing of P's dtype is its unit roundoff.
    ones = (
        apart
        and not a.values.operand_error
        and a.exponential.uniform
        and a.exp < a.probability_roundoff / 2
    )
    truth = exact_probabilities(trial) if ones else trial.truth
    return stored(want, p.scaled_output), truth.out_bound, truth.lse_bound


ORACLE = Oracle(
    name="counting",
    group="counting",
    catches=(
        "off-by-one errors in masks, windows, lengths and alignments; a wrong base of LSE; a lost"
        " or doubled key"
    ),
    judge=judge,
    needs=frozenset(
        {
            Premise.NORM_BOUNDED_SCORES,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
            Premise.FACTORS_BY_HEAD,
            Premise.KNOWN_OUTPUT,
        }
    ),
)
