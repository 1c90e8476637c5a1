"""Slice: one sequence alone gives the bits that it gave in the batch; one key head alone is within
its bounds.

Sequences and heads do not affect each other's results, so the truth of a part is that part of the
truth. Equal bits are expected if the contract promises them (`batch_invariant`), runs repeat, the
sequence has all its heads, and its buffers have the same alignment alone as in the batch: a kernel
can use another code path if rows begin at other boundaries. Otherwise both results are compared
within their bounds.

Backward: one sequence alone gives the gradients that it gave in the batch, under the same
conditions. Its own forward should save the same bits; the gradients follow from them.

Premises: the part's batch and heads begin at 0 (position_free_scores), other sequences and heads
have no effect (hidden_has_no_effect), and a head keeps its factor (factors_by_head).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from references.masks import intersect
from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.metamorphic import (
    Pair,
    check_same_bits,
    check_within_bounds,
    failed,
    forward_pairs,
    forward_results,
    gradient_results,
    same_bits,
)
from verify.judging.parts import Part
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.variant import ROW_ALIGNMENT, Support

_NEEDS = frozenset(
    {Premise.POSITION_FREE_SCORES, Premise.HIDDEN_HAS_NO_EFFECT, Premise.FACTORS_BY_HEAD}
)


def sliced(problem: Problem, support: Support) -> tuple[Part, Problem]:
    """Return a part, which is one sequence or one key head of it with its query heads, and the
    problem of that part alone.

    A random mask differs in every sequence and head, so only the first of each can run alone.
    Raises ValueError if the support has no such problem.
    """
    word = problem.seed // 2
    sequence = problem.batch > 1 and (problem.heads_kv == 1 or problem.seed % 2 == 0)
    for b, h in ((word % problem.batch, word % problem.heads_kv), (0, 0)):
        heads = range(problem.heads_kv) if sequence else range(h, h + 1)
        part = Part.of(problem, batch=range(b, b + 1), heads_kv=heads)
        alone = part.problem(problem, support)
        if alone is not None:
            return part, alone
    raise ValueError(f"no part of it is supported alone: {problem.name}")


def invariant(trial: Trial, alone: Problem) -> bool:
    """Return whether the contract promises the same bits: the sequence has all its heads, and its
    buffers have the same alignment.

    A kernel can use another code path if rows begin at other boundaries, which happens if a stride
    becomes unused.
    """
    whole = trial.problem
    sizes = {
        name: (whole.format_out if name in ("out", "dout") else whole.format).itemsize
        for name in whole.layouts
    }
    alike = all(
        layout.aligned(whole.shapes[name], sizes[name], ROW_ALIGNMENT)
        == layout.aligned(alone.shapes[name], sizes[name], ROW_ALIGNMENT)
        for name, layout in whole.layouts.items()
    )
    return trial.declaration.contract.batch_invariant and alike and alone.heads_kv == whole.heads_kv


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Give the problem two sequences if it has one sequence with one key head."""
    if problem.batch > 1 or problem.heads_kv > 1:
        return problem
    atoms = (atom.extended(problem.seqlen_q, problem.seqlen_kv) for atom in problem.mask.atoms)
    return problem.but(batch=2, mask=intersect(*atoms))


def _part(trial: Trial) -> Trial:
    """Return the trial of the part alone."""
    return trial.noted("slice", _cut)


def _cut(trial: Trial) -> Trial:
    part, alone = sliced(trial.problem, trial.declaration.support)
    dout = part.result(trial.problem, trial.dout) if trial.entry == "backward" else None
    return trial.beside("slice", alone, inputs=part.inputs(trial), dout=dout)


def judge(trial: Trial) -> Ruling:
    """Run the part alone and compare bit for bit if the contract promises it, else in bounds."""
    part, alone = sliced(trial.problem, trial.declaration.support)
    other = _part(trial)
    found = failed(other)
    if found is not None:
        return found
    move, when = partial(part.result, trial.problem), name_of(part, alone)
    pairs = list(forward_pairs(trial, other, move))
    if trial.declaration.contract.deterministic and invariant(trial, alone):
        return check_same_bits("slice", when, pairs)
    return same_bits(pairs) or check_within_bounds(
        "slice", when, forward_results(trial, other, move)
    )


def name_of(part: Part, alone: Problem) -> str:
    """Describe the slice in words."""
    head = f" and key head {part.heads_kv.start}" if len(part.heads_kv) == 1 else ""
    return f"with sequence {part.batch.start}{head} alone"


def judge_backward(trial: Trial) -> Ruling:
    """Run the part's own forward and backward and compare the gradients as `judge` does."""
    part, alone = sliced(trial.problem, trial.declaration.support)
    other = _part(trial)
    found = failed(other)
    if found is not None:
        return found
    pairs, when, contract = (
        list(_gradient_pairs(trial, other, part)),
        name_of(part, alone),
        trial.declaration.contract,
    )
    if contract.deterministic and contract.deterministic_backward and invariant(trial, alone):
        return check_same_bits("gradient_slice", when, pairs)
    move = partial(part.gradient, trial.problem)
    return same_bits(pairs) or check_within_bounds(
        "gradient_slice", when, gradient_results(trial, other, move)
    )


def _gradient_pairs(trial: Trial, other: Trial, part: Part) -> Iterator[Pair]:
    for name, tensor in trial.first.outputs.items():
        yield name, part.gradient(trial.problem, name, tensor), other.first.outputs[name]


GROUPS = (
    Group(
        name="slice",
        about="one sequence, or one head of it, alone",
        family="relations",
        adapt=adapt,
    ),
    Group(
        name="gradient_slice",
        about="gradients of one sequence, or of one head of it, alone",
        entry="backward",
        family="relations",
        adapt=adapt,
    ),
)

FORWARD = Oracle(
    name="slice",
    group="slice",
    catches=(
        "leaks between sequences and heads, indices that overflow or wrap with the batch, schedules"
        " that depend on the batch"
    ),
    judge=judge,
    launches=first_of(_part),
    needs=_NEEDS,
    concerns=lambda trial: trial.problem.batch * trial.problem.heads_kv > 1,
)

BACKWARD = Oracle(
    name="gradient_slice",
    group="gradient_slice",
    catches=(
        "gradients that leak between sequences and heads, accumulators that these share, schedules"
        " that depend on the batch"
    ),
    judge=judge_backward,
    launches=first_of(_part),
    needs=_NEEDS,
    concerns=lambda trial: trial.problem.batch * trial.problem.heads_kv > 1,
)

ORACLES = (FORWARD, BACKWARD)
