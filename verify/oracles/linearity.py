"""Linearity: O is linear in V, so the O of V's leading bits and the O of the rest add up; LSE does
not depend on V.

V is split exactly in two, V = V1 + V2. Then O(V) = O(V1) + O(V2) except for the errors of the three
results, so the slack is the sum of their three bounds. LSE depends on Q and K alone: it keeps its
bits if runs repeat.

Backward: dQ, dK and dV are linear in dO. dO is split exactly in two, and the gradients add up
within the sum of all three bounds, each computed from what its own forward saved.

If a part of an element can overflow, its bound is infinite and the element is left out, even if the
sum does not overflow.

Premises: the oracle tests linear_in_values itself. O is neither scaled nor rounded twice
(exact_output), since a part can overflow if the whole does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    RelatedResult,
    check_same_bits,
    check_within_bounds,
    failed,
    leading_bit,
    part_bound,
)
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.judging.truth import Truth, compute_truth
from verify.oracles import Group, Oracle
from verify.problem.inputs import dequantised


def truths(trials: list[Trial]) -> list[Truth]:
    """Return reference and bounds of trials that differ in V alone, from one pass over their
    scores: their V are columns of one wider V."""
    one = trials[0]
    p, width = one.problem, one.problem.head_dim_v
    q, k, _ = one.expanded
    columns = torch.cat([dequantised(p, trial.inputs)[2].double() for trial in trials], -1)
    whole = compute_truth(
        p.but(head_dim_v=width * len(trials)),
        (q, k, columns),
        [one.arithmetic.without_interval],
        one.clock,
    )
    outs, bounds = (
        x.view(*x.shape[:-1], len(trials), width).unbind(-2) for x in (whole.out, whole.out_bound)
    )
    return [
        Truth(out=out, lse=whole.lse, out_bound=bound, lse_bound=whole.lse_bound)
        for out, bound in zip(outs, bounds, strict=True)
    ]


def _parts(trial: Trial) -> list[Trial]:
    """Return the trials of both parts of V; for a backward, of dO."""
    return trial.noted("linearity parts", _split)


def _split(trial: Trial) -> list[Trial]:
    p, given = trial.problem, trial.inputs
    if trial.entry == "backward":
        parts = leading_bit(trial.dout, p.format_out)
        tags = ("leading bits of dO", "rest of dO")
        return [
            trial.beside(tag, p, inputs=given, dout=part)
            for tag, part in zip(tags, parts, strict=True)
        ]
    parts = leading_bit(given.v, p.format)
    tags = ("leading bits of V", "rest of V")
    return [
        trial.beside(tag, p, inputs=replace(given, v=part))
        for tag, part in zip(tags, parts, strict=True)
    ]


def launches(trial: Trial) -> list[Wanted]:
    """The first launches of both parts."""
    return [Wanted(part) for part in _parts(trial)]


def judge(trial: Trial) -> Ruling:
    """Check O(V) = O(V1) + O(V2) within the three bounds, with V = V1 + V2 exactly, and that LSE
    keeps its bits."""
    lead, rest = _parts(trial)
    for other in (lead, rest):
        found = failed(other)
        if (
            found is None
            and trial.declaration.contract.deterministic
            and trial.first.lse is not None
        ):
            assert other.first.lse is not None
            found = check_same_bits(
                "linearity", "with another V", [("lse", trial.first.lse, other.first.lse)]
            )
        if found is not None and found.finding is not None:
            return found
    return check_within_bounds(
        "linearity",
        "as the sum of the results of V's leading bits and of the rest",
        _results([trial, lead, rest]),
    )


def _results(trials: list[Trial]) -> Iterator[RelatedResult]:
    (whole, *bounds), outs = truths(trials), [trial.first.out for trial in trials]
    first, *others = [out.double() for out in outs if out is not None]
    output = trials[0].problem.format_out
    one, two = (part_bound(part.out_bound, part.out, output) for part in bounds)
    yield RelatedResult(
        "out",
        first,
        whole.out_bound,
        others[0] + others[1],
        one + two,
        whole.out,
        output,
        ~whole.empty,
    )


def judge_backward(trial: Trial) -> Ruling:
    """Check g(dO) = g(dO1) + g(dO2) within the three bounds, with dO = dO1 + dO2 exactly; each
    bound allows for the errors of its own forward."""
    others = _parts(trial)
    for other in others:
        found = failed(other)
        if found is not None:
            return found
    return check_within_bounds(
        "gradient_linearity",
        "as the sum of the gradients by dO's leading bits and by the rest",
        _gradient_results(trial, others),
    )


def _gradient_results(trial: Trial, others: list[Trial]) -> Iterator[RelatedResult]:
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


GROUPS = (
    Group(name="linearity", about="V, and two parts that add up to V", family="relations"),
    Group(
        name="gradient_linearity",
        about="dO, and two parts that add up to dO",
        entry="backward",
        family="relations",
    ),
)

FORWARD = Oracle(
    name="linearity",
    group="linearity",
    catches="values that are clamped, flushed or treated as special; an LSE that depends on V",
    judge=judge,
    launches=launches,
    needs=frozenset({Premise.LINEAR_IN_VALUES, Premise.EXACT_OUTPUT}),
    concerns=lambda trial: trial.problem.pairs > 0,
)

BACKWARD = Oracle(
    name="gradient_linearity",
    group="gradient_linearity",
    catches=(
        "upstream gradients that are clamped or flushed, a wrong delta, accumulators that are not"
        " cleared"
    ),
    judge=judge_backward,
    launches=launches,
    needs=frozenset({Premise.LINEAR_IN_VALUES}),
    concerns=lambda trial: trial.problem.pairs > 0,
)

ORACLES = (FORWARD, BACKWARD)
