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

import torch
from torch import Tensor

from references.premises import Premise
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.invariants import KNOWN, beyond, forward_slack, reach
from verify.judging.selected_positions import positions
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.oracles import Group, Oracle, convexity, gather
from verify.oracles.long.problems import forward_problems
from verify.problem import Problem
from verify.problem.known_answers import gather_targets
from verify.problem.premises import broken
from verify.problem.visibility import intervals, live_rows
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
    p, run, a = (
        trial.problem,
        trial.first,
        resolve(trial.declaration.numerics, trial.config, trial.problem, trial.arch),
    )
    assert run.out is not None
    live, reached = live_rows(p), _reach(trial)
    slack = forward_slack(p, a, reached, trial.expanded)
    asked = live & ~slack.beyond
    bad = asked[..., None] & ~run.out.isfinite()
    if bool(bad.any()):
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
    low, high = (x[:, None].expand(p.batch, p.heads_kv, p.seqlen_q) for x in found)
    count = (high - low).clamp(min=1).repeat_interleave(p.group, 1)
    logs = torch.log(count.double())
    size = reached if p.score_mod is None else p.score_mod.reach(p.extent, reached)
    if broken(_MEAN_SCORES, p) is not None or not p.seqlen_kv:
        return logs - size, logs + size
    running = torch.nn.functional.pad(k.double(), (0, 0, 1, 0)).cumsum(2)
    ends = (running.gather(2, x[..., None].expand(*x.shape, p.head_dim)) for x in (high, low))
    sums = next(ends) - next(ends)
    mean = p.scale * (q.double() * sums.repeat_interleave(p.group, 1)).sum(-1) / count
    lost = 4 * p.seqlen_kv * _U64 * p.seqlen_kv / count * reached
    return logs + mean - lost, logs + size


def _reach(trial: Trial) -> Tensor:
    """Return `reach` of the trial's Q and K."""
    q, k, _ = trial.expanded
    return reach(trial.problem, q, k)


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


def _sharper(trial: Trial, known: Truth) -> Truth:
    """Return that truth, with the bounds of `gather` at `sharp_rows`."""
    a, p = gather.one_key_arithmetic(trial), trial.problem
    if a is None or not p.seqlen_kv:
        return known
    rows = sharp_rows(p)
    some = trial.truth_at(rows, a)
    out, lse = known.out_bound.clone(), known.lse_bound.clone()
    out[:, :, rows], lse[:, :, rows] = some.out_bound, some.lse_bound
    return replace(known, out_bound=out, lse_bound=lse)


def gathered_truth(trial: Trial) -> Truth:
    """Return the truth of a problem of `gather`; only the winners' scores are computed, since all
    other weights are 0.

    O is exact, and its bound no narrower than the bits in which `gather` compares it with V.  The
    LSE's bound is that of the row's largest score, or +inf if none is derived for the numerics.
    """
    p, (q, k, v) = trial.problem, trial.expanded
    targets = gather_targets(p)
    live = targets >= 0

    def selected(x: Tensor) -> Tensor:
        index = targets.clamp(min=0)[..., None].expand(*targets.shape, x.shape[-1])
        return x.repeat_interleave(p.group, 1).gather(2, index)

    lse = p.scale * (q.double() * selected(k.double())).sum(-1)
    out = selected(v).double().masked_fill(~live[..., None], 0.0)
    bound = torch.full_like(lse, math.inf)
    if _applies(trial.declaration) is None:
        arithmetic = resolve(trial.declaration.numerics, trial.config, p, trial.arch)
        bound = forward_slack(p, arithmetic, _reach(trial), trial.expanded).lse
    return Truth(out, lse.masked_fill(~live, -math.inf), out.abs() * _ROUNDED, bound)


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
