"""Relaunch, of gradients: another problem of the same shapes in the same process, then the first
one again."""

from __future__ import annotations

from collections.abc import Iterator

from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.relaunch import Result, judged


def judge(trial: Trial) -> Ruling:
    """Its dQ, dK and dV, from what its own forward saved, within their bounds; then the first
    problem's bits again."""
    return judged(
        "relaunch_backward",
        trial,
        _results,
        repeats=trial.declaration.contract.deterministic_backward,
    )


def _results(trial: Trial) -> Iterator[Result]:
    truth = trial.gradients
    for name, got in trial.first.outputs.items():
        yield name, got, getattr(truth, name), getattr(truth, f"{name}_bound"), trial.problem.format


GROUP = Group(
    name="relaunch_backward",
    about="the gradients of another problem of the same shapes, and of the first again",
    entry="backward",
    family="relations",
)
ORACLE = Oracle(
    name="relaunch_backward",
    group="relaunch_backward",
    catches=(
        "what a backward keeps of one launch and applies to the next: scales, masks, strides,"
        " delta, counters"
    ),
    judge=judge,
)
