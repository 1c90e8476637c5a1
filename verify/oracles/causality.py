"""Causality: a changed key, value or query changes no bit of a row that does not see it.

The oracle replaces one hidden key with its value, and one query, by other ordinary numbers. A row
that sees neither computes the same from the same operands, so it keeps its bits. A kernel that
rescales lazily, or is not declared deterministic, is compared within its bounds instead: the rows
of a tile can vote on when to catch up with the maximum. Rows that share a maximum (`maximum.rows`)
see all that any row of their tile sees.

Backward: a row whose dO is 0 adds nothing to any gradient, and a row and a key that are hidden from
each other do not affect each other. First dO is set to 0 from some row on: dQ of these rows is
exactly 0, and so are dK and dV of keys that only these rows see, because dO = 0 gives dP = delta =
0, hence dS = 0. Then one key is replaced. The other gradients keep their bits; they are compared
within their bounds if the forward rescales lazily or rows share a maximum. Elements whose bound is
infinite are not compared: inf * 0 is NaN.

Premises: the oracle tests hidden_has_no_effect itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import cast
from verify.cell.arena import bits
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.metamorphic import (
    Pair,
    RelatedResult,
    beyond_arithmetic,
    check_same_bits,
    check_within_bounds,
    failed,
    forward_pairs,
    forward_results,
    gradient_results,
    spread,
)
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.source import Source
from verify.tolerance.maxima import whole_tiles
from verify.tolerance.resolution import resolve


def changed(tensor: Tensor, at: int, dtype: DType) -> Tensor:
    """Return a copy of a stored tensor with row `at` of every sequence and head negated; zeros
    become 1."""
    row = tensor[:, :, at].double().numpy()
    found = tensor.clone()
    bits(found)[:, :, at] = bits(cast(np.where(row == 0, 1.0, -row), dtype))
    return found


def hidden_key(problem: Problem, seen: Tensor) -> int | None:
    """Return a key that some row does not see, preferably one that another row sees, or None.
    seen: see `visible`."""
    some, every = seen.flatten(0, 2).any(0), seen.flatten(0, 2).all(0)
    for among in (some & ~every, ~every):
        keys = among.nonzero().flatten()
        if len(keys):
            return int(keys[int(Source(problem).raw("k", "changed", 1)[0]) % len(keys)])
    return None


def visible(problem: Problem) -> Tensor:
    """Return the mask as booleans, (batch, heads_q, seqlen_q, seqlen_kv)."""
    return problem.mask.dense(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)


def judge(trial: Trial) -> Ruling:
    """Compare bit for bit if runs repeat bit for bit, else within bounds."""
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
    untouched = ~whole_tiles(~untouched, shared)  # rows that share a maximum affect each other
    other, when = trial.beside("changed", p, inputs=values), f"with {' and '.join(what)} changed"
    found = failed(other)
    if found is not None:
        return found
    # Rows of a tile can vote on when to catch up with a lagging maximum.
    if (
        not trial.declaration.contract.deterministic
        or trial.declaration.numerics.softmax.maximum.lag
    ):
        return check_within_bounds("causality", when, _within(trial, other, untouched))
    asked = dict.fromkeys(trial.first.outputs, untouched)
    return check_same_bits(
        "causality", when, forward_pairs(trial, other), asked, lambda name: _beyond(trial, other)
    )


def _beyond(trial: Trial, other: Trial) -> Tensor:
    """Return the rows that can overflow in either problem: a changed key can, behind a mask."""
    return beyond_arithmetic(trial) | beyond_arithmetic(other)


def _within(trial: Trial, other: Trial, untouched: Tensor) -> Iterator[RelatedResult]:
    for r in forward_results(trial, other):
        yield replace(r, asked=untouched & ~trial.truth.empty)


@dataclass(frozen=True)
class Scope:
    """The rows of dQ (batch, heads_q, seqlen_q) and of dK and dV (batch, heads_kv, seqlen_kv) that
    are compared, as booleans."""

    dq: Tensor
    dkv: Tensor

    @property
    def named(self) -> Mapping[str, Tensor]:
        return {"dq": self.dq, "dk": self.dkv, "dv": self.dkv}


def judge_backward(trial: Trial) -> Ruling:
    """Compare first with dO = 0 in the last rows, then with another key."""
    seen = visible(trial.problem)
    found = _without_rows(trial, seen)
    return found if found.finding is not None else _with_another_key(trial, seen)


def _without_rows(trial: Trial, seen: Tensor) -> Ruling:
    """Set dO = 0 from some row on and check that dQ is exactly 0 there, and so are dK and dV of
    keys that only those rows see."""
    p = trial.problem
    start = int(Source(p).raw("out", "live", 1)[0]) % (p.seqlen_q + 1)
    dout = trial.dout.clone()
    dout[:, :, start:] = 0
    other, when = (
        trial.beside("fewer rows", p, inputs=trial.inputs, dout=dout),
        f"with dO = 0 from row {start} on",
    )
    found = failed(other)
    if found is not None:
        return found
    live = (torch.arange(p.seqlen_q) < start).expand(seen.shape[:3])
    touched = _of_keys(p, (seen & live[..., None]).any(2))
    nothing = Scope(~live, ~touched)
    for name, tensor in other.first.outputs.items():
        bad = spread(nothing.named[name], tensor) & (tensor != 0)
        if bool(bad.any()):
            # If the bound is infinite, a weight can have overflowed, and inf * 0 is NaN.
            bad &= getattr(trial.gradients, f"{name}_bound").isfinite()
        if bool(bad.any()):
            at = first(bad)
            message = (
                f"{when}: {name} should be 0 at {place(name, at)}, is {float(tensor[at]):.9g};"
                f" {int(bad.sum())} of {bad.numel()} elements are not 0"
            )
            return convict(
                "gradient_causality", message, name=name, bad=bad, got=float(tensor[at]), bound=0.0
            )
    return _unchanged(
        trial,
        other,
        when,
        Scope(live, ~_of_keys(p, (seen & ~live[..., None]).any(2))),
        same_forward=True,
    )


def _with_another_key(trial: Trial, seen: Tensor) -> Ruling:
    """Change one hidden key: rows that do not see it, and keys that no row sees together with it,
    keep their gradients."""
    p, values = trial.problem, trial.inputs
    key = hidden_key(p, seen)
    if key is None:
        return Ruling()
    values = replace(values, k=changed(values.k, key, p.format), v=changed(values.v, key, p.format))
    other = trial.beside("another key", p, inputs=values, dout=trial.dout)
    found = failed(other)
    if found is not None:
        return found
    looking = seen[..., key]
    together = _of_keys(p, (seen & looking[..., None]).any(2))
    # Rows of a tile can vote on when to catch up with a lagging maximum, or can share a maximum.
    numerics = trial.declaration.numerics
    same = not numerics.softmax.maximum.lag and numerics.softmax.maximum.rows == 1
    return _unchanged(
        trial, other, f"with key {key} changed", Scope(~looking, ~together), same_forward=same
    )


def _of_keys(problem: Problem, found: Tensor) -> Tensor:
    """Reduce booleans per query head and key to booleans per key head and key: true if true for any
    query head of the group."""
    return found.reshape(problem.batch, problem.heads_kv, problem.group, problem.seqlen_kv).any(2)


def _unchanged(
    trial: Trial, other: Trial, when: str, scope: Scope, *, same_forward: bool
) -> Ruling:
    """Compare bit for bit if forward and backward repeat bit for bit and these rows are the same in
    both forwards; else within bounds."""
    contract = trial.declaration.contract
    if same_forward and contract.deterministic and contract.deterministic_backward:
        excused = partial(_unbounded, trial, other)
        return check_same_bits(
            "gradient_causality", when, _pairs(trial, other), scope.named, excused
        )
    results = (
        replace(r, asked=scope.named[r.name])
        for r in gradient_results(trial, other, lambda name, tensor: tensor)
    )
    return check_within_bounds("gradient_causality", when, results)


def _unbounded(trial: Trial, other: Trial, name: str) -> Tensor:
    """Return the elements that an overflowing row can reach in either problem: inf * 0 is NaN."""
    bounds: list[Tensor] = [getattr(asked.gradients, f"{name}_bound") for asked in (trial, other)]
    return ~(bounds[0].isfinite() & bounds[1].isfinite())


def _pairs(trial: Trial, other: Trial) -> Iterator[Pair]:
    for name, tensor in trial.first.outputs.items():
        yield name, tensor, other.first.outputs[name]


GROUPS = (
    Group(
        name="causality",
        about="a changed key, value and query that a row does not see",
        family="relations",
        masked=True,
    ),
    Group(
        name="gradient_causality",
        about="rows with dO = 0, and a changed key that rows do not see",
        entry="backward",
        family="relations",
        masked=True,
    ),
)

FORWARD = Oracle(
    name="causality",
    group="causality",
    catches=(
        "rows that read a key just past the edge of their mask, rows that give a masked key a small"
        " weight, rows that affect each other"
    ),
    judge=judge,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: trial.problem.seqlen_q > 0,
)

BACKWARD = Oracle(
    name="gradient_causality",
    group="gradient_causality",
    catches=(
        "gradients of masked pairs, of rows past the edge of a block and of padding; delta of a"
        " wrong row; sums that are not cleared"
    ),
    judge=judge_backward,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: trial.problem.pairs > 0,
)

ORACLES = (FORWARD, BACKWARD)
