"""Duplicated keys: if every key and value occurs twice, O stays the same and LSE grows by ln 2.

Numerator and denominator of softmax double, and the largest score stays. So O stays and LSE grows
by ln 2, each within its own bound. Without a mask the copies lie apart, in other blocks. If the
mask depends on the row, the queries are doubled too, and the rows that see both copies are
compared. The mask must be one that can be doubled: random masks cannot.

Premises: a copy of a key has another position, the same score (position_free_scores) and the same
factor (factors_by_head); only visible keys have weight (visible_mass_only, rows_average_values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.masks import Atom, Full, Mask, intersect, kind_of
from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    RelatedResult,
    check_within_bounds,
    failed,
    forward_results,
    taken,
)
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.problem.lengths import fitted
from verify.problem.refusal import inside
from verify.variant import Declaration, Support


@dataclass(frozen=True)
class Doubled:
    """The problem with every key twice.  rows: queries are doubled too: key j becomes 2 j and 2 j +
    1, query i likewise, and row 2 i + 1 sees exactly both copies of what row i saw, since masks
    depend on distances from a diagonal."""

    problem: Problem
    rows: bool

    def positions(self, length: int) -> Tensor:
        """Return the source of each doubled key, (2 length,) int64.  Without a mask the copies lie
        apart, in other blocks."""
        keys = torch.arange(length)
        return torch.cat((keys, keys)) if self.problem.mask == Full() else keys.repeat_interleave(2)

    def inputs(self, given: Inputs) -> Inputs:
        """Return the doubled inputs."""
        order = self.positions(given.k.shape[2])
        q = (
            taken(given.q, torch.arange(given.q.shape[2]).repeat_interleave(2))
            if self.rows
            else given.q
        )
        return replace(given, q=q, k=taken(given.k, order), v=taken(given.v, order))


def doubled(problem: Problem) -> Doubled:
    """Return the doubled problem; raises ValueError for a mask that cannot be doubled."""
    rows = any(atom.by_row for atom in problem.mask.atoms)
    mask = intersect(*(_doubled(atom, rows) for atom in problem.mask.atoms))
    twice = problem.but(
        seqlen_q=problem.seqlen_q * (1 + rows), seqlen_kv=2 * problem.seqlen_kv, mask=mask
    )
    return Doubled(twice, rows)


def _doubled(atom: Atom, rows: bool) -> Mask:
    found = atom.doubled(rows=rows)
    if found is None:
        raise ValueError(f"mask: {atom.name} cannot be doubled")
    return found


def _doubles(atom: Atom) -> bool:
    return atom.doubled(rows=True) is not None


def _word_doubles(word: str) -> bool:
    """Return whether masks of that word can be doubled; the examples of their kind decide."""
    kind = kind_of(word)
    atoms = (atom for mask in kind.gallery() for atom in mask.atoms)
    return any(isinstance(atom, kind) and _doubles(atom) for atom in atoms)


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Halve the lengths, so that the doubled problem is as large as the drawn one."""
    atoms = [atom for atom in problem.mask.atoms if _doubles(atom)]
    least = max(support.min_seqlen, 1)
    rows, keys = (max((n + 1) // 2, min(n, least)) for n in (problem.seqlen_q, problem.seqlen_kv))
    half = dict(zip(("seqlen_q", "seqlen_kv"), fitted(support, rows, keys), strict=True))
    found = problem.but(**half, mask=intersect(*(atom.halved() for atom in atoms)))
    for candidate in (found, found.but(mask=Full())):
        if inside(support, candidate) and inside(support, doubled(candidate).problem):
            return candidate
    return None


def _twice(trial: Trial) -> Trial:
    """Return the trial of the doubled problem."""
    return trial.noted("doubled", _double)


def _double(trial: Trial) -> Trial:
    twice = doubled(trial.problem)
    return trial.beside("doubled", twice.problem, inputs=twice.inputs(trial.inputs))


def judge(trial: Trial) -> Ruling:
    """Run the doubled problem and compare: O stays, LSE grows by ln 2."""
    twice, other = doubled(trial.problem), _twice(trial)
    if twice.rows:
        return failed(other) or check_within_bounds(
            "duplicated_keys", "with every row and key doubled", _odd(trial, other)
        )
    return failed(other) or check_within_bounds(
        "duplicated_keys", "with every key doubled", _whole(trial, other)
    )


def _whole(trial: Trial, other: Trial) -> Iterator[RelatedResult]:
    for r in forward_results(trial, other, own_bounds=True):
        more = math.log(2) if r.name == "lse" else 0.0
        yield replace(r, before=r.before + more, truth=r.truth + more)


def _odd(trial: Trial, other: Trial) -> Iterator[RelatedResult]:
    """Yield the results of the rows that see both copies."""
    for r in _whole(trial, other):
        yield replace(r, after=r.after[:, :, 1::2], after_bound=r.after_bound[:, :, 1::2])


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why no problem of a variant can be doubled, or None."""
    found = any(map(_word_doubles, declaration.support.masks))
    return None if found else "supports random masks alone"


def admits(problem: Problem, support: Support) -> bool:
    """Return whether the problem can be doubled within the support."""
    return all(map(_doubles, problem.mask.atoms)) and inside(support, doubled(problem).problem)


GROUP = Group(
    name="duplicated_keys",
    about="every key and value twice",
    family="relations",
    adapt=adapt,
    admits=admits,
)
ORACLE = Oracle(
    name="duplicated_keys",
    group="duplicated_keys",
    catches=(
        "a normaliser that loses keys or blocks, wrong ties of the maximum, an LSE that does not"
        " grow with the number of keys"
    ),
    judge=judge,
    launches=first_of(_twice),
    excludes=excludes,
    needs=frozenset(
        {
            Premise.POSITION_FREE_SCORES,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
            Premise.FACTORS_BY_HEAD,
        }
    ),
    concerns=lambda trial: trial.problem.pairs > 0,
)
