"""Gradient linearity: dQ, dK and dV are linear in dO, so those of dO's leading bits and those of
the rest add up."""

from __future__ import annotations

from collections.abc import Iterator

from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    RelatedResult,
    check_within_bounds,
    failed,
    leading_bit,
    part_bound,
)
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle


def judge(trial: Trial) -> Ruling:
    """g(dO) = g(dO1) + g(dO2), dO = dO1 + dO2 exactly: within the bounds of all three, each for
    what its forward saved."""
    parts = leading_bit(trial.dout, trial.problem.format_out)
    tags = ("leading bits of dO", "rest of dO")
    others = [
        trial.beside(tag, trial.problem, inputs=trial.inputs, dout=part)
        for tag, part in zip(tags, parts, strict=True)
    ]
    for other in others:
        found = failed(other)
        if found is not None:
            return found
    return check_within_bounds(
        "gradient_linearity",
        "as the sum of the gradients by dO's leading bits and by the rest",
        _results(trial, others),
    )


def _results(trial: Trial, others: list[Trial]) -> Iterator[RelatedResult]:
    one, two = others
    for name, tensor in trial.first.outputs.items():
        output, bound = trial.problem.format, getattr(trial.gradients, f"{name}_bound")
        parts = [
            part_bound(getattr(t.gradients, f"{name}_bound"), getattr(t.gradients, name), output)
            for t in others
        ]
        total = one.first.outputs[name].double() + two.first.outputs[name].double()
        yield RelatedResult(
            name, tensor, bound, total, parts[0] + parts[1], getattr(trial.gradients, name), output
        )


GROUP = Group(
    name="gradient_linearity",
    about="dO in two parts that add up to it",
    entry="backward",
    family="relations",
)
ORACLE = Oracle(
    name="gradient_linearity",
    group="gradient_linearity",
    catches=(
        "upstream gradients that are clamped or flushed, a delta of something else, accumulators"
        " that keep what they had"
    ),
    judge=judge,
    concerns=lambda trial: trial.problem.pairs > 0,
)
