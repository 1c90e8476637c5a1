"""Key permutation: another order of keys that the same rows see leaves O and LSE the same.

Softmax and P V are sums over keys, in any order, and so are their bounds, which therefore hold for
both orders: the two results may differ by the sum of both bounds. A key moves only among keys that
exactly the same rows see. If a mask fixes the order of the keys, such as a causal mask on a square,
another mask replaces it. The kernel must support problems without a mask.

Backward: dK and dV move with their keys, and dQ stays. The forward of the permuted keys saves other
last bits; the bounds of the second problem take these into account.

Premises: a key has the same score (position_free_scores) and the same factor (factors_by_head) in
another place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    check_within_bounds,
    failed,
    forward_results,
    gradient_results,
    taken,
)
from verify.judging.parts import no_full_mask, with_mask
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.source import Source
from verify.variant import Declaration, Support


def permutation(problem: Problem) -> Tensor:
    """Return a random order of the keys, (seqlen_kv,) int64, in which each key stays among those
    that exactly the same rows see.

    The edges of the rows' intervals cut the keys into such runs.  All sequences and heads have the
    same order, since they can share K.
    """
    keys = np.arange(problem.seqlen_kv)
    try:
        low, high = problem.mask.row_bounds(problem.batch, problem.seqlen_q, problem.seqlen_kv)
    except ValueError:  # rows see no intervals
        return torch.from_numpy(keys)
    edges = np.unique(torch.stack((low, high))[:, high > low].numpy())
    run = np.searchsorted(edges, keys, side="right")
    return torch.from_numpy(np.lexsort((Source(problem).raw("k", "permutation", len(keys)), run)))


def moves(problem: Problem) -> bool:
    """Return whether at least a quarter of the keys move, or there are fewer than four."""
    moved = int((permutation(problem) != torch.arange(problem.seqlen_kv)).sum())
    return 4 * moved >= problem.seqlen_kv or problem.seqlen_kv < 4


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Replace a mask that fixes the order of the keys, such as a causal one on a square."""
    return with_mask(problem, support, moves)


def asked(trial: Trial) -> bool:
    """Return whether some key moves and there is a row."""
    return trial.problem.seqlen_q > 0 and bool(
        (permutation(trial.problem) != torch.arange(trial.problem.seqlen_kv)).any()
    )


def _permuted(trial: Trial) -> Trial:
    """Return the trial with permuted keys."""
    return trial.noted("permuted", _permute)


def _permute(trial: Trial) -> Trial:
    order, values = permutation(trial.problem), trial.inputs
    moved = replace(values, k=taken(values.k, order), v=taken(values.v, order))
    dout = trial.dout if trial.entry == "backward" else None
    return trial.beside("permuted", trial.problem, inputs=moved, dout=dout)


def judge(trial: Trial) -> Ruling:
    """Compare with permuted keys; the bounds hold for both orders."""
    other = _permuted(trial)
    return failed(other) or check_within_bounds(
        "key_permutation", "with its keys permuted", forward_results(trial, other)
    )


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why keys cannot be permuted, or None: see `no_full_mask`."""
    return no_full_mask(declaration.support)


def judge_backward(trial: Trial) -> Ruling:
    """Compare the gradients with permuted keys, each within the bounds of its own problem."""
    order, other = permutation(trial.problem), _permuted(trial)

    def move(name: str, tensor: Tensor) -> Tensor:
        return tensor[:, :, order] if name in ("dk", "dv") else tensor

    results = gradient_results(trial, other, move)
    return failed(other) or check_within_bounds(
        "gradient_key_permutation", "with its keys permuted", results
    )


GROUPS = (
    Group(
        name="key_permutation", about="the keys in another order", family="relations", adapt=adapt
    ),
    Group(
        name="gradient_key_permutation",
        about="gradients of keys in another order",
        entry="backward",
        family="relations",
        adapt=adapt,
    ),
)

FORWARD = Oracle(
    name="key_permutation",
    group="key_permutation",
    catches=(
        "weights that depend on a key's position: first and last blocks, tails, a maximum that"
        " lags, skipped rescales"
    ),
    judge=judge,
    launches=first_of(_permuted),
    needs=frozenset({Premise.POSITION_FREE_SCORES, Premise.FACTORS_BY_HEAD}),
    excludes=excludes,
    concerns=asked,
)

BACKWARD = Oracle(
    name="gradient_key_permutation",
    group="gradient_key_permutation",
    catches=(
        "gradients that depend on a key's position: first and last blocks, tails, sums that begin"
        " too late"
    ),
    judge=judge_backward,
    launches=first_of(_permuted),
    needs=frozenset({Premise.POSITION_FREE_SCORES, Premise.FACTORS_BY_HEAD}),
    excludes=excludes,
    concerns=asked,
)

ORACLES = (FORWARD, BACKWARD)
