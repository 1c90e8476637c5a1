"""Gradients of replicated heads: dQ is the same, and dK and dV of a key head are the sums over its
copies."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from verify.judging.findings import Ruling
from verify.judging.metamorphic import RelatedResult, check_within_bounds, failed, part_bound
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.replicated_heads import adapt, excludes, replicas, replicated


def judge(trial: Trial) -> Ruling:
    """The copies' gradients are summed in fp64, and so are their bounds."""
    p = trial.problem
    other = trial.beside(
        "replicated", replicated(p), inputs=replicas(p, trial.inputs), dout=trial.dout
    )
    when = f"with {p.heads_kv} key heads stored once for each of {p.heads_q} query heads"
    return failed(other) or check_within_bounds(
        "gradient_replicated_heads", when, _results(trial, other)
    )


def _results(trial: Trial, other: Trial) -> Iterator[RelatedResult]:
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


GROUP = Group(
    name="gradient_replicated_heads",
    about="gradients of grouped heads, and of the same ungrouped",
    entry="backward",
    family="relations",
    adapt=adapt,
)
ORACLE = Oracle(
    name="gradient_replicated_heads",
    group="gradient_replicated_heads",
    catches=(
        "heads of a group that are left out of dK and dV, counted twice, or given to another key"
        " head"
    ),
    judge=judge,
    excludes=excludes,
    concerns=lambda trial: trial.problem.group > 1 and trial.problem.pairs > 0,
)
