"""Decode step: the last query rows alone, as in a decode step, give the last rows of the prefill.

A row of attention does not depend on other queries, so the truth of the last rows is the same in
both problems. The second problem has 1, 2, 7 or 16 rows: one token, a few tokens of a speculative
decoder, or a chunk. A kernel can use another code path for few rows, so both results are compared
within their bounds, and the share of equal bits is measured. If rows share a maximum, each problem
has its own bounds. The kernel must support lengths that differ and problems without a mask.

Premises: other queries have no effect (hidden_has_no_effect); a row alone has another position
(position_free_scores) and the same factor (factors_by_head).
"""

from __future__ import annotations

from functools import partial

from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    check_within_bounds,
    failed,
    forward_pairs,
    forward_results,
    same_bits,
)
from verify.judging.parts import Part, with_mask
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.coverage import square_only
from verify.variant import Declaration, Support
from verify.variant.support import up

_ROWS = (1, 1, 1, 2, 7, 16)  # a token, a few tokens of a speculative decoder, a chunk


def last(problem: Problem, support: Support) -> Part:
    """Return the last rows of a problem, most often one; at least the support's minimum."""
    rows = max(_ROWS[problem.seed % len(_ROWS)], support.min_seqlen)
    rows = up(rows, support.seqlen_q_multiple)
    return Part.of(problem, rows=range(max(problem.seqlen_q - rows, 0), problem.seqlen_q))


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Give the problem at least two rows, and another mask if the last rows alone cannot have its
    mask, such as a random one."""
    if problem.seqlen_q < 2:
        problem = problem.but(seqlen_q=(2 + problem.seed % 32) * support.seqlen_q_multiple)
    return with_mask(
        problem,
        support,
        lambda candidate: last(candidate, support).problem(candidate, support) is not None,
    )


def _last_rows(trial: Trial) -> Trial:
    """Return the trial of the last rows alone."""
    return trial.noted("decode", _alone)


def _alone(trial: Trial) -> Trial:
    support = trial.declaration.support
    part = last(trial.problem, support)
    problem = part.problem(trial.problem, support)
    assert problem is not None
    return trial.beside("decode", problem, inputs=part.inputs(trial))


def judge(trial: Trial) -> Ruling:
    """Compare within bounds, since a kernel can use another code path for few rows; measure the
    share of equal bits."""
    part, other = last(trial.problem, trial.declaration.support), _last_rows(trial)
    when = f"with the last {len(part.rows)} of {trial.problem.seqlen_q} rows alone"
    move = partial(part.result, trial.problem)
    found = failed(other) or same_bits(forward_pairs(trial, other, move))
    # Rows that share a maximum share it with other rows when they run alone.
    shared = trial.declaration.numerics.softmax.maximum.rows != 1
    results = forward_results(trial, other, move, own_bounds=shared)
    return found or check_within_bounds("decode_step", when, results)


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why a variant cannot run its last rows alone, or None."""
    if square_only(declaration.support):
        return "supports no lengths that differ"
    return None if "full" in declaration.support.masks else "supports no problem without a mask"


GROUP = Group(name="decode_step", about="the last rows alone", family="relations", adapt=adapt)
ORACLE = Oracle(
    name="decode_step",
    group="decode_step",
    catches=(
        "wrong alignment of masks with few rows and many keys, faults of the code path for short"
        " queries, rows past the last tile"
    ),
    judge=judge,
    launches=first_of(_last_rows),
    excludes=excludes,
    needs=frozenset(
        {Premise.HIDDEN_HAS_NO_EFFECT, Premise.POSITION_FREE_SCORES, Premise.FACTORS_BY_HEAD}
    ),
    concerns=lambda trial: trial.problem.seqlen_q > 1 and trial.problem.seqlen_kv > 0,
)
