"""Convexity: O is an average of the V that its row sees, so it lies between their minimum and
maximum.  This needs no reference.

The weights of the average are not negative, for any scores. So

    min V - slack <= O <= max V + slack

over the keys that the row sees (over all keys of the head that some row sees, if rows do not see
single intervals). If V is constant, O is that constant. The slack follows from docs/tolerance.md
without delta:

    slack = M [ (1 + u_P)(1 + kappa(n))(1 + u)^(2 n_b) - 1 + min(n (eta_P + 2 t) g, 1) + ls ]
            / (1 - ls),    M = max |V|,

then division, flushed numbers and the output's rounding are added (`_average` of
`verify/judging/invariants.py`). g needs |m| <= |s| |q| max |k|. The time is linear in the length:
minima and maxima of intervals come from a table of powers of two.

The oracle catches outputs that are not normalised, lost rescales, values from other rows, and
off-by-one errors if rows see few keys.

Premises: O is an average (rows_average_values) of the values that the row sees (visible_mass_only),
norms bound the scores in the slack (norm_bounded_scores), and O is rounded once (exact_output).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.positions import slices
from references.premises import Premise
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.invariants import KNOWN, beyond, forward_slack, reach
from verify.judging.launch import Launch
from verify.judging.stacked import stacked, together
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem import Problem
from verify.problem.visibility import live_rows, measurable, visible_range
from verify.tolerance.arithmetic import FP32_MAX
from verify.tolerance.resolution import resolve
from verify.variant import Declaration

_NOTE = "convexity"
_PART = 1 << 16  # elements of O that are compared at once
NEEDS = frozenset(
    {
        Premise.ROWS_AVERAGE_VALUES,
        Premise.VISIBLE_MASS_ONLY,
        Premise.NORM_BOUNDED_SCORES,
        Premise.EXACT_OUTPUT,
    }
)


@dataclass(frozen=True)
class _Between:
    """Every element of a live row lies between the limits, in that launch of a case."""

    run: Launch


def judge(trial: Trial) -> Ruling:
    """Check min V - slack <= O <= max V + slack.  The slack consists of roundings alone."""
    p, run = trial.problem, trial.first
    assert run.out is not None
    known = trial.notes.get(_NOTE)
    if isinstance(known, _Between) and known.run is run:
        return Ruling(measures={"convexity_r": 0.0})
    got, low, high, live = _by_key_head(p, trial.expanded[2], run.out)
    # nearly always true, and then no slack is needed
    if _between(got, low, high, live, 1)[0]:
        return Ruling(measures={"convexity_r": 0.0})
    got, low, high = got.double(), low.double(), high.double()
    off, asked = _slack(trial, torch.maximum(low.abs(), high.abs()))
    asked = asked & live
    outside = torch.maximum(low - got, got - high).clamp(min=0.0)
    # A number that is too large for the output becomes an infinity of the same sign.
    overflow = p.format_out.overflow
    fits = (got == torch.inf) & (high + off >= overflow) | (got == -torch.inf) & (
        low - off <= -overflow
    )
    ratio = torch.where(~asked | fits | (outside == 0), 0.0, outside / off).nan_to_num(
        nan=torch.inf
    )
    measures = {"convexity_r": float(ratio.max())}
    bad = ~(ratio <= 1).view(run.out.shape)
    if not bool(bad.any()):
        return Ruling(measures=measures)
    at = first(bad)
    least, most, limit = (
        float(x.expand(got.shape).reshape(run.out.shape)[at]) for x in (low, high, off)
    )
    value = float(run.out[at])
    message = (
        f"out is {value:.9g} at {place('out', at)}, but the row sees only V between {least:.9g} and"
        f" {most:.9g}; {int(bad.sum())} of {bad.numel()} elements are no averages"
    )
    return convict("convexity", message, name="out", bad=bad, got=value, bound=limit)


def ask_together(stack: Sequence[Trial]) -> None:
    """Note of launched cases of one shape whether every element lies between the limits; each of
    the others has to be judged alone."""
    p = stacked([trial.problem for trial in stack])
    v = together([trial.expanded[2] for trial in stack])
    out = together([trial.first.outputs["out"] for trial in stack])
    between = _between(*_by_key_head(p, v, out), len(stack))
    for trial, own in zip(stack, between, strict=True):
        if own:
            trial.notes[_NOTE] = _Between(trial.first)


def _by_key_head(p: Problem, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, its limits and its live rows, (batch, heads_kv, group, seqlen_q, ...); of the limits, the
    query heads of a group share one."""
    per_head = _per_head(p)
    low, high = (x[:, :, None] for x in visible_range(p, v))
    return out.view(*per_head, p.head_dim_v), low, high, live_rows(p).reshape(*per_head, 1)


def _between(got: Tensor, low: Tensor, high: Tensor, live: Tensor, cases: int) -> list[bool]:
    """Whether every element of a live row of each case lies between `low` and `high`; some rows at
    a time, in the dtype of the limits, which holds O too."""
    found = torch.ones(cases, dtype=torch.bool)
    for rows in slices(got.shape[3], max(_PART * got.shape[3] // max(got.numel(), 1), 1)):
        part, own = got[..., rows, :].to(low.dtype), live[..., rows, :]
        least, most = (x if x.shape[3] == 1 else x[..., rows, :] for x in (low, high))
        inside = ((part >= least) & (part <= most)) | ~own
        found &= inside.reshape(cases, -1).all(1)
    return found.tolist()


def _per_head(p: Problem) -> tuple[int, int, int, int]:
    return p.batch, p.heads_kv, p.group, p.seqlen_q


def _slack(trial: Trial, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the allowed error of an average of V whose magnitudes are at most `size` (0 where V is
    0), and the elements that are judged."""
    p, per_head = trial.problem, _per_head(trial.problem)
    a = resolve(trial.declaration.numerics, trial.config, p, trial.arch)
    q, k, _ = trial.expanded
    slack = forward_slack(p, a, reach(p, q, k), trial.expanded)
    off = slack.average.view(*per_head, 1) * size + slack.absolute.view(*per_head, 1)
    off = off + a.output.unit_roundoff * (size + off) + a.output.smallest_subnormal / 2
    asked = ~slack.beyond.view(*per_head, 1) & (
        4 * p.seqlen_kv * a.probability_scale * size < FP32_MAX
    )
    return off * (size > 0), asked


def _applies(declaration: Declaration) -> str | None:
    return beyond(declaration.numerics, KNOWN)


ORACLE = Oracle(
    name="convexity",
    group="accuracy",
    catches=(
        "outputs that are not normalised, lost rescales, keys from the range of another row,"
        " garbage; at any length"
    ),
    judge=judge,
    together=ask_together,
    excludes=_applies,
    needs=NEEDS,
    concerns=lambda trial: (
        trial.problem.seqlen_q > 0 and trial.problem.seqlen_kv > 0 and measurable(trial.problem)
    ),
    rank=25,
)
