"""Counting: with Q = 0 all visible keys have equal weights, so O = hits / visible and LSE = ln
visible.

V[:, 0] = 1, and V[j, c] = 1 where j = c - 1 modulo the rest. The oracle counts the hits and the
visible keys from the mask, in integers.

Nearly every exponential has exp(0) = 1 (`one_at_zero` in `verify/arithmetic/instructions.py`). Then
every weight and every rescale is 1, in any format, and all sums are integers, exact in any order
(docs/tolerance.md, *Exact sums*). Only the division and the rounding of O can err, and the
logarithm and what multiplies it. If the kernel declares the order of its keys, O in 16 bits must be
one of the numbers between those to which the ends of the division's error round: mostly one. The
same holds of an O in fp32, whose last step is the division, and of an O in 8 bits, the rounded and
cut multiple of hits / visible.

If P is normalised, made of an LSE, or merged, then its row sum is exact, and the bounds of
docs/tolerance.md hold of the rest: 1 / visible is rounded, tf32 cuts it by up to 2^-10, and an LSE
that divides P is rounded. If exp(0) is not known to be 1, all of these bounds hold, with u_P = 0 if
P can only be rounded to 1. A function without a declaration is judged by them, too.

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
from verify.arithmetic.instructions import LOG_ERROR
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.numerics.hypotheses import exact_probabilities
from verify.problem.visibility import intervals
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.exact_sums import ExactUnit, of_ones
from verify.tolerance.forward_log_sum import LOG2_ROUNDINGS
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

    If all weights and rescales are 1, their sums are exact, and O is one division.  Otherwise the
    forward's own bounds hold, without what is exact all the same; and without the rounding of P if
    P can only be rounded to 1.
    """
    p, numerics = trial.problem, trial.declaration.numerics
    a = resolve(numerics, trial.config, p, trial.arch)
    exact = None
    if not trial.declaration.undeclared:
        exact = of_ones(a, p.seqlen_kv, trial.arch)
    if exact is None:
        # Just below 1, the spacing of P's dtype is its unit roundoff.
        ones = (
            not (a.normalised or a.by_lse or a.excess or a.columns)
            and not a.values.operand_error
            and a.exponential.uniform
            and a.exp < a.probability_roundoff / 2
        )
        truth = exact_probabilities(trial) if ones else trial.truth
        return stored(want, p.scaled_output), truth.out_bound, truth.lse_bound
    if not isinstance(exact.values, ExactUnit) or a.merged:
        truth = trial.truth_of(exact.without_interval)
        return stored(want, p.scaled_output), truth.out_bound, truth.lse_bound
    limit = _lse_error(logs + a.offset)
    if a.log2_sum and a.probability_scale == 1:
        limit = LOG_ERROR * logs.clamp(min=math.log(2)) + U * LOG2_ROUNDINGS * logs
    before = want * relative(a.division + a.output_roundings, U)
    if p.scaled_output is None and not a.ordered and a.output.itemsize < 4:
        # Not even that O is rounded once is declared.
        rounding = (want + before) * a.output.unit_roundoff + a.output.smallest_subnormal / 2
        return want, (before + rounding) * (want > 0), limit
    low, high = stored_ends(want, before, p.format_out, p.scaled_output)
    return (low + high) / 2, (high - low) / 2, limit


def _lse_error(logs: Tensor) -> Tensor:
    """Return the allowed error of the logarithm of an exact number of 1 or more.

    Its relative error, from 2 on; its own roundings (2), that of a change of base and those of one
    there and back (3).
    """
    return LOG_ERROR * logs.clamp(min=math.log(2)) + relative(5, U) * logs


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
