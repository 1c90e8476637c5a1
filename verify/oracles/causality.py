"""Causality: another key, value or query changes no bit of a row that does not look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import cast
from verify.cell.arena import bits
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    RelatedResult,
    beyond_arithmetic,
    check_same_bits,
    check_within_bounds,
    failed,
    forward_pairs,
    forward_results,
)
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.distributions import Source
from verify.tolerance.arithmetic import resolve
from verify.tolerance.maxima import whole_tiles


def changed(tensor: Tensor, at: int, dtype: DType) -> Tensor:
    """A stored tensor with other ordinary numbers in row `at` of every sequence and head: its
    negative, 1 where that is 0."""
    row = tensor[:, :, at].double().numpy()
    found = tensor.clone()
    bits(found)[:, :, at] = bits(cast(np.where(row == 0, 1.0, -row), dtype))
    return found


def hidden_key(problem: Problem, seen: Tensor) -> int | None:
    """A key that some row does not see, and another does if there is one; seen: the mask's
    booleans."""
    some, every = seen.flatten(0, 2).any(0), seen.flatten(0, 2).all(0)
    for among in (some & ~every, ~every):
        keys = among.nonzero().flatten()
        if len(keys):
            return int(keys[int(Source(problem).raw("k", "changed", 1)[0]) % len(keys)])
    return None


def visible(problem: Problem) -> Tensor:
    """The mask's booleans, (batch, heads_q, seqlen_q, seqlen_kv)."""
    return problem.mask.dense(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)


def judge(trial: Trial) -> Ruling:
    """Bitwise where runs repeat bitwise, within bounds where they do not."""
    p, values = trial.problem, trial.inputs
    seen = visible(p)
    key, query = hidden_key(p, seen), int(Source(p).raw("q", "changed", 1)[0]) % p.seqlen_q
    untouched = torch.arange(p.seqlen_q).expand(seen.shape[:3]) != query
    what = [f"query {query}"]
    values = replace(values, q=changed(values.q, query, p.format))
    if key is not None:
        untouched &= ~seen[..., key]
        what.append(f"key {key}")
        values = replace(
            values, k=changed(values.k, key, p.format), v=changed(values.v, key, p.format)
        )
    shared = resolve(trial.declaration.numerics, trial.config, p, trial.arch).maximum_rows
    untouched = ~whole_tiles(~untouched, shared)  # rows that share a maximum look at each other
    other, when = trial.beside("changed", p, inputs=values), f"with {' and '.join(what)} changed"
    found = failed(other)
    if found is not None:
        return found
    # Rows of a tile may vote on whether a lagging maximum is caught up with.
    if not trial.declaration.contract.deterministic or trial.declaration.numerics.lazy_rescale:
        return check_within_bounds("causality", when, _within(trial, other, untouched))
    asked = dict.fromkeys(trial.first.outputs, untouched)
    return check_same_bits(
        "causality", when, forward_pairs(trial, other), asked, lambda name: _beyond(trial, other)
    )


def _beyond(trial: Trial, other: Trial) -> Tensor:
    """Rows in which either may overflow: what was changed may, behind a mask."""
    return beyond_arithmetic(trial) | beyond_arithmetic(other)


def _within(trial: Trial, other: Trial, untouched: Tensor) -> Iterator[RelatedResult]:
    for r in forward_results(trial, other):
        yield replace(r, asked=untouched & ~trial.truth.empty)


GROUP = Group(
    name="causality",
    about="a key, value and query that a row does not look at",
    family="relations",
    masked=True,
)
ORACLE = Oracle(
    name="causality",
    group="causality",
    catches=(
        "rows that look at a key just behind their mask's edge, at a masked one a little, or at"
        " each other"
    ),
    judge=judge,
    concerns=lambda trial: trial.problem.seqlen_q > 0,
)
