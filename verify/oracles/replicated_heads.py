"""Replicated heads: grouped heads give the same results if each key head is stored once for every
query head.

Query heads of a group read equal keys and values in both problems, so the truth is the same. A
kernel can pack the rows of a group into one tile, which changes the order of its sums: both results
are compared within their bounds, and the share of equal bits is measured. The kernel must support
grouped heads.

Backward: dQ stays. dK and dV of a key head are the sums over its copies, because each query head of
the group adds its part to the shared head. The copies' gradients are summed in fp64, and so are
their bounds. An element is left out if it can overflow in a copy.

Premises: other heads have no effect (hidden_has_no_effect), and a head is copied with its factor
(factors_by_head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    RelatedResult,
    check_within_bounds,
    failed,
    forward_pairs,
    forward_results,
    part_bound,
    same_bits,
    taken,
)
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.variant import Declaration, Support


def replicated(problem: Problem) -> Problem:
    """Return the problem with a key head for every query head."""
    return problem.but(heads_kv=problem.heads_q)


def replicas(problem: Problem, given: Inputs) -> Inputs:
    """Return the inputs of the replicated problem; a tensor stored once for all heads stays so."""

    def repeat(tensor: Tensor) -> Tensor:
        return taken(tensor, torch.arange(problem.heads_kv).repeat_interleave(problem.group), 1)

    k, v = (
        tensor if "h" in layout.expand else repeat(tensor)
        for tensor, layout in ((given.k, problem.layout_k), (given.v, problem.layout_v))
    )
    others = {
        name: x if problem.quantisation.shared else repeat(x) for name, x in given.others.items()
    }
    return replace(given, k=k, v=v, others=others)


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Give the problem two or three query heads per key head if it has one."""
    return (
        problem
        if problem.group > 1
        else problem.but(heads_q=problem.heads_kv * (2 + problem.seed % 2))
    )


def _copied(trial: Trial) -> Trial:
    """Return the trial with a key head for every query head."""
    return trial.noted("replicated", _copy)


def _copy(trial: Trial) -> Trial:
    p, dout = trial.problem, trial.dout if trial.entry == "backward" else None
    return trial.beside("replicated", replicated(p), inputs=replicas(p, trial.inputs), dout=dout)


def judge(trial: Trial) -> Ruling:
    """Compare within bounds, since a kernel can pack the rows of a group; measure the share of
    equal bits."""
    other = _copied(trial)
    when = (
        f"with {trial.problem.heads_kv} key heads stored once for each of {trial.problem.heads_q}"
        " query heads"
    )
    found = failed(other) or same_bits(forward_pairs(trial, other))
    return found or check_within_bounds("replicated_heads", when, forward_results(trial, other))


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why a variant has no head to replicate, or None."""
    return {False: "supports no grouped heads", "only": "supports grouped heads only"}.get(
        declaration.support.grouped_heads
    )


def judge_backward(trial: Trial) -> Ruling:
    """Compare gradients within bounds; those of the copies and their bounds are summed in fp64."""
    p = trial.problem
    other = _copied(trial)
    when = f"with {p.heads_kv} key heads stored once for each of {p.heads_q} query heads"
    return failed(other) or check_within_bounds(
        "gradient_replicated_heads", when, _gradient_results(trial, other)
    )


def _gradient_results(trial: Trial, other: Trial) -> Iterator[RelatedResult]:
    def summed(name: str, tensor: Tensor) -> Tensor:
        b, _, *rest = tensor.shape
        return (
            tensor.double()
            if name == "dq"
            else tensor.double().view(b, -1, trial.problem.group, *rest).sum(2)
        )

    output = trial.problem.format
    for name, tensor in trial.first.outputs.items():
        yield RelatedResult(
            name,
            tensor,
            getattr(trial.gradients, f"{name}_bound"),
            summed(name, other.first.outputs[name]),
            summed(
                name,
                part_bound(
                    getattr(other.gradients, f"{name}_bound"),
                    getattr(other.gradients, name),
                    output,
                ),
            ),
            getattr(trial.gradients, name),
            output,
        )


GROUPS = (
    Group(
        name="replicated_heads",
        about="grouped heads, and the same problem without groups",
        family="relations",
        adapt=adapt,
    ),
    Group(
        name="gradient_replicated_heads",
        about="gradients of grouped heads, and of the same problem without groups",
        entry="backward",
        family="relations",
        adapt=adapt,
    ),
)

FORWARD = Oracle(
    name="replicated_heads",
    group="replicated_heads",
    catches=(
        "maps of query heads to key heads that are right only for some numbers of heads, wrongly"
        " packed groups, a descale of a wrong head"
    ),
    judge=judge,
    launches=first_of(_copied),
    excludes=excludes,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT, Premise.FACTORS_BY_HEAD}),
    concerns=lambda trial: trial.problem.group > 1 and trial.problem.pairs > 0,
)

BACKWARD = Oracle(
    name="gradient_replicated_heads",
    group="gradient_replicated_heads",
    catches=(
        "heads of a group that are left out of dK and dV, counted twice, or added to another key"
        " head"
    ),
    judge=judge_backward,
    launches=first_of(_copied),
    excludes=excludes,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT, Premise.FACTORS_BY_HEAD}),
    concerns=lambda trial: trial.problem.group > 1 and trial.problem.pairs > 0,
)

ORACLES = (FORWARD, BACKWARD)
