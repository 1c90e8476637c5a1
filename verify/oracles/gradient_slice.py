"""Gradient slice: one sequence alone gives the gradients' bits that it gave in the batch; one key
head is within its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    Pair,
    check_same_bits,
    check_within_bounds,
    failed,
    gradient_results,
    same_bits,
)
from verify.judging.parts import Part
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.slice import adapt, invariant, name_of, sliced


def judge(trial: Trial) -> Ruling:
    """What the sequence's own forward saves should be the same, too; the gradients follow from
    it."""
    part, alone = sliced(trial.problem, trial.declaration.support)
    dout = part.result(trial.problem, trial.dout)
    other = trial.beside("slice", alone, inputs=part.inputs(trial), dout=dout)
    found = failed(other)
    if found is not None:
        return found
    pairs, when, contract = (
        list(_pairs(trial, other, part)),
        name_of(part, alone),
        trial.declaration.contract,
    )
    if contract.deterministic and contract.deterministic_backward and invariant(trial, alone):
        return check_same_bits("gradient_slice", when, pairs)
    move = partial(part.gradient, trial.problem)
    return same_bits(pairs) or check_within_bounds(
        "gradient_slice", when, gradient_results(trial, other, move)
    )


def _pairs(trial: Trial, other: Trial, part: Part) -> Iterator[Pair]:
    for name, tensor in trial.first.outputs.items():
        yield name, part.gradient(trial.problem, name, tensor), other.first.outputs[name]


GROUP = Group(
    name="gradient_slice",
    about="the gradients of one sequence, or of one head of it, alone",
    entry="backward",
    family="relations",
    adapt=adapt,
)
ORACLE = Oracle(
    name="gradient_slice",
    group="gradient_slice",
    catches=(
        "gradients that leak between sequences and heads, accumulators shared by them, schedules"
        " that depend on the batch"
    ),
    judge=judge,
    concerns=lambda trial: trial.problem.batch * trial.problem.heads_kv > 1,
)
