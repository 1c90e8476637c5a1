"""Gradient causality: a row whose dO is 0 gives nothing to any gradient, and nothing goes between
rows and keys that are hidden from each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verify.judging.findings import Ruling, convict, first, place
from verify.judging.metamorphic import (
    Pair,
    check_same_bits,
    check_within_bounds,
    failed,
    gradient_results,
    spread,
)
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.causality import changed, hidden_key, visible
from verify.problem import Problem
from verify.problem.distributions import Source


@dataclass(frozen=True)
class Scope:
    """Where dQ (batch, heads_q, seqlen_q) and dK and dV (batch, heads_kv, seqlen_kv) keep their
    bits."""

    dq: Tensor
    dkv: Tensor

    @property
    def named(self) -> Mapping[str, Tensor]:
        return {"dq": self.dq, "dk": self.dkv, "dv": self.dkv}


def judge(trial: Trial) -> Ruling:
    """First without the dO of the last rows, then with another key."""
    seen = visible(trial.problem)
    found = _without_rows(trial, seen)
    return found if found.finding is not None else _with_another_key(trial, seen)


def _without_rows(trial: Trial, seen: Tensor) -> Ruling:
    """dO = 0 from some row on: dQ is exactly 0 there, and so are dK and dV of keys that only those
    rows see."""
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
            # Where the whole's bound is infinite, a weight may have overflowed, and inf * 0 is NaN.
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
    """Rows that do not see it, and keys that no row sees together with it, do not notice."""
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
    # Rows of a tile may vote on whether a lagging maximum is caught up with, or share one: see
    # `causality`.
    numerics = trial.declaration.numerics
    same = not numerics.lazy_rescale and numerics.maximum_rows == 1
    return _unchanged(
        trial, other, f"with key {key} changed", Scope(~looking, ~together), same_forward=same
    )


def _of_keys(problem: Problem, found: Tensor) -> Tensor:
    """Booleans per query head and key, as booleans per key head and key: true for any head of the
    group."""
    return found.reshape(problem.batch, problem.heads_kv, problem.group, problem.seqlen_kv).any(2)


def _unchanged(
    trial: Trial, other: Trial, when: str, scope: Scope, *, same_forward: bool
) -> Ruling:
    """Bitwise where forward and backward repeat bitwise, and these rows of both forwards are the
    same; else within bounds."""
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
    """Elements that a row outside the declared arithmetic can reach in either question: inf * 0 is
    NaN."""
    bounds: list[Tensor] = [getattr(asked.gradients, f"{name}_bound") for asked in (trial, other)]
    return ~(bounds[0].isfinite() & bounds[1].isfinite())


def _pairs(trial: Trial, other: Trial) -> Iterator[Pair]:
    for name, tensor in trial.first.outputs.items():
        yield name, tensor, other.first.outputs[name]


GROUP = Group(
    name="gradient_causality",
    about="rows without dO, and a key that rows do not look at",
    entry="backward",
    family="relations",
    masked=True,
)
ORACLE = Oracle(
    name="gradient_causality",
    group="gradient_causality",
    catches=(
        "gradients of masked pairs, of rows past a block's edge and of padding; delta of another"
        " row; sums not cleared"
    ),
    judge=judge,
    concerns=lambda trial: trial.problem.pairs > 0,
)
