"""Long sequences as a whole: every O is finite, every LSE lies between two limits that need no
scores, and O is known if one key wins.

All rows of sequences past 131072 are judged: O is finite, and LSE counts the keys that the row
sees. For n visible scores with mean a and magnitudes up to r, ln n + a <= LSE <= ln n + r (Jensen).
The mean of scores is the score of the mean key, whose sums over intervals are differences of
running sums. The slack is that of the row's largest score. Every row must see one interval of keys.
convexity and gather judge these lengths too. docs/long-sequences.md describes the problems.

Premises: LSE counts the visible keys alone (visible_mass_only), and norms bound the scores
(norm_bounded_scores). If scores are not linear and position_free, -r replaces a.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from references.premises import Premise
from verify.judging.by_rows import all_finite, by_rows, key_rows
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.invariants import KNOWN, ForwardSlack, beyond, forward_slack, reach
from verify.judging.selected_positions import positions
from verify.judging.trial import Trial
from verify.judging.truth import LateTruth
from verify.oracles import Group, Oracle, convexity, gather
from verify.oracles.long.problems import forward_problems
from verify.problem import Problem
from verify.problem.known_answers import gather_targets
from verify.problem.premises import broken
from verify.problem.visibility import by_segments, cuts, intervals, live_rows
from verify.tolerance.resolution import resolve
from verify.variant import Declaration

_U64 = 2.0**-53
_ROUNDED = 2.0**-8  # more than `gather` rounds an O in fp32 by
# Scores of a case up to which all rows have the bounds of `gather`, and as many are computed if
# there are more.
_SCORES = 1 << 20
# The mean of a row's scores is the score of the mean key.
_MEAN_SCORES = frozenset({Premise.LINEAR_SCORES, Premise.POSITION_FREE_SCORES})


def judge(trial: Trial) -> Ruling:
    """Check that every row that sees a key has a finite O and an LSE inside `lse_range`."""
    p, run = trial.problem, trial.first
    assert run.out is not None
    live, reached, slack = live_rows(p), _reach(trial), _slack(trial)
    asked = live & ~slack.beyond
    bad = None if all_finite(run.out) else asked[..., None] & ~run.out.double().isfinite()
    if bad is not None and bool(bad.any()):
        at = first(bad)
        got = float(run.out[at])
        message = (
            f"out is {got} at {place('out', at)}; {int(bad.sum())} of {bad.numel()} elements are"
            " not finite"
        )
        return convict("long_whole", message, name="out", bad=bad, got=got, bound="finite")
    if run.lse is None:
        return Ruling()
    low, high = lse_range(trial, reached)
    natural = trial.natural_lse(run.lse)
    bad = asked & ~((natural >= low - slack.lse) & (natural <= high + slack.lse))
    if not bool(bad.any()):
        return Ruling()
    at = first(bad)
    message = (
        f"lse is {float(natural[at]):.9g} at {place('lse', at)}, but the mean and the size of the"
        f" row's scores and the number of its keys put it between {float(low[at]):.9g} and"
        f" {float(high[at]):.9g}, give or take {float(slack.lse[at]):.3g}; {int(bad.sum())} of"
        f" {bad.numel()} rows are wrong"
    )
    return convict(
        "long_whole",
        message,
        name="lse",
        bad=bad,
        got=float(natural[at]),
        bound=float(slack.lse[at]),
    )


def lse_range(trial: Trial, reached: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest LSE that a row may have, fp64 (batch, heads_q, seqlen_q).

    For n visible scores with mean a and magnitudes up to r, ln n + a <= LSE <= ln n + r (Jensen).
    The mean of scores is the score of the mean key, whose sums over intervals are differences of
    running sums; if a feature changes the scores, -r replaces a.
    """
    p, (q, k, _) = trial.problem, trial.expanded
    found = intervals(p)
    assert found is not None
    shape = (p.batch, p.heads_q, p.seqlen_q)
    count = (found[1] - found[0]).clamp(min=1)[:, None].expand(shape)
    logs = torch.log(count.double())
    size = reached if p.score_mod is None else p.score_mod.reach(p.extent, reached)
    if broken(_MEAN_SCORES, p) is not None or not p.seqlen_kv:
        return logs - size, logs + size
    # The sums over the segments that intervals consist of, and from those all others.
    at = cuts(p, *found)
    parts = by_segments(k, at, lambda part: part.double().sum(2, keepdim=True)).double()
    running = torch.from_numpy(np.add.accumulate(pad(parts, (0, 0, 1, 0)).numpy(), axis=2))
    table, width = running.flatten(0, 2), running.shape[2]
    begin = torch.arange(p.batch * p.heads_q).view(p.batch, p.heads_q, 1) // p.group * width
    low, high = (begin + torch.searchsorted(at, x)[:, None] for x in found)

    def of_mean(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
        first, last = (table.index_select(0, x.flatten()).view(rows.shape) for x in (low, high))
        return (rows.double() * (last - first)).sum(-1)

    mean = p.scale * by_rows(of_mean, q, low, high) / count
    lost = 4 * p.seqlen_kv * _U64 * p.seqlen_kv / count * reached
    return logs + mean - lost, logs + size


def _reach(trial: Trial) -> Tensor:
    """Return `reach` of the trial's Q and K, computed once."""

    def made(own: Trial) -> Tensor:
        q, k, _ = own.expanded
        return reach(own.problem, q, k)

    return trial.noted("reach", made)


def _slack(trial: Trial) -> ForwardSlack:
    """Return `forward_slack` of the declared arithmetic, computed once."""

    def made(own: Trial) -> ForwardSlack:
        p = own.problem
        a = resolve(own.declaration.numerics, own.config, p, own.arch)
        return forward_slack(p, a, _reach(own), own.expanded)

    return trial.noted("forward_slack", made)


def gather_long(trial: Trial) -> Ruling:
    """Check that every row of O is the row of V that it selects, bit for bit, and that some rows
    are within the bounds of `gather`."""
    # replaces the cached property and the note, which would compute all scores
    trial.__dict__["truth"] = known = gathered_truth(trial)
    trial.notes[gather.TRUTH] = _sharper(trial, known)
    return gather.judge(trial)


def sharp_rows(p: Problem) -> Tensor:
    """Return the rows of a problem of `gather` whose bounds are those of its oracle: all of them
    unless there are many scores, else some of the selected positions, int64, ascending."""
    scores = p.batch * p.heads_q * p.seqlen_kv
    if scores * p.seqlen_q <= _SCORES:
        return torch.arange(p.seqlen_q)
    rows = positions(p, "rows")
    count = min(len(rows), max(_SCORES // max(scores, 1), 2))
    return rows[torch.linspace(0, len(rows) - 1, count).long()]


def _sharper(trial: Trial, known: LateTruth) -> LateTruth:
    """Return that truth, with the bounds of `gather` at `sharp_rows`."""
    a, p = gather.one_key_arithmetic(trial), trial.problem
    if a is None or not p.seqlen_kv:
        return known
    rows = sharp_rows(p)
    some = trial.truth_at(rows, a)
    lse = known.lse_bound.clone()
    lse[:, :, rows] = some.lse_bound

    def made() -> tuple[Tensor, Tensor]:
        bound = known.out_bound.clone()
        bound[:, :, rows] = some.out_bound
        return known.out, bound

    return replace(known, lse_bound=lse, make=made)


def gathered_truth(trial: Trial) -> LateTruth:
    """Return the truth of a problem of `gather`; only the winners' scores are computed, since all
    other weights are 0.

    O is exact, and its bound no narrower than the bits in which `gather` compares it with V.  The
    LSE's bound is that of the row's largest score, or +inf if none is derived for the numerics.
    """
    p, (q, k, v) = trial.problem, trial.expanded
    targets = trial.noted(gather.TARGETS, lambda own: gather_targets(own.problem))
    live = targets >= 0
    table = k.flatten(0, 2)

    def of_winner(rows: Tensor, keys: Tensor) -> Tensor:
        own = table.index_select(0, keys.flatten()).view(rows.shape)
        return (rows.double() * own.double()).sum(-1)

    def made() -> tuple[Tensor, Tensor]:
        out = gather.selected_rows(p, v, targets).double().masked_fill(~live[..., None], 0.0)
        return out, out.abs() * _ROUNDED

    lse = torch.zeros(targets.shape, dtype=torch.float64)
    if p.seqlen_kv:
        lse = p.scale * by_rows(of_winner, q, key_rows(p, targets))
    known = _applies(trial.declaration) is None
    bound = _slack(trial).lse if known else torch.full_like(lse, math.inf)
    lse = lse.masked_fill(~live, -math.inf)
    return LateTruth(lse=lse, lse_bound=bound, make=made)


def _applies(declaration: Declaration) -> str | None:
    return beyond(declaration.numerics, KNOWN)


GROUP = Group(
    name="long",
    about=(
        "sequences past 131072, and more sequences than a grid is wide: chosen rows, and invariants"
        " of all rows"
    ),
    asks=forward_problems,
    first_look="file",
    admits=lambda problem, support: True,  # the problems depend on the machine
)

ORACLES = (
    Oracle(
        name="long_whole",
        group="long",
        catches="rows anywhere that are not finite, or whose LSE does not count their visible keys",
        judge=judge,
        excludes=_applies,
        needs=frozenset({Premise.VISIBLE_MASS_ONLY, Premise.NORM_BOUNDED_SCORES}),
        concerns=lambda trial: intervals(trial.problem) is not None,
        rank=10,
    ),
    replace(convexity.ORACLE, group="long", rank=25),
    replace(
        gather.FORWARD,
        group="long",
        catches="keys and rows anywhere that are lost, doubled or confused, bit for bit",
        judge=gather_long,
        concerns=lambda trial: trial.problem.distribution == "gather",
        rank=30,
    ),
)
