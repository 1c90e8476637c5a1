"""Gradients of permuted keys: dK and dV move with their keys, dQ stays."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_within_bounds, failed, gradient_results, taken
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.key_permutation import adapt, asked, excludes, permutation


def judge(trial: Trial) -> Ruling:
    """The forward of the permuted keys saves other last bits, which the second's own bounds
    know."""
    order, values = permutation(trial.problem), trial.inputs
    moved = replace(values, k=taken(values.k, order), v=taken(values.v, order))
    other = trial.beside("permuted", trial.problem, inputs=moved, dout=trial.dout)

    def move(name: str, tensor: Tensor) -> Tensor:
        return tensor[:, :, order] if name in ("dk", "dv") else tensor

    results = gradient_results(trial, other, move)
    return failed(other) or check_within_bounds(
        "gradient_key_permutation", "with its keys permuted", results
    )


GROUP = Group(
    name="gradient_key_permutation",
    about="gradients of keys in another order",
    entry="backward",
    family="relations",
    adapt=adapt,
)
ORACLE = Oracle(
    name="gradient_key_permutation",
    group="gradient_key_permutation",
    catches=(
        "gradients that depend on a key's place: first and last blocks, tails, sums that begin too"
        " late"
    ),
    judge=judge,
    excludes=excludes,
    concerns=asked,
)
