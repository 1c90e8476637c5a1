"""Relaunch: another problem of the same shapes in the same process is right too, and leaves nothing
behind for the first.

The second problem runs in the same process and over the same memory. It has the same shapes and
dtype, other values and, wherever the support allows it, another scale, mask, softcap and strides.
Its results must be within its own bounds, although the first problem came before it. Then the first
problem runs again: it must give the same bits, although the other came before it. Kernels that do
not declare that runs repeat are asked for the bounds alone.

Backward: the same of dQ, dK and dV, from what the other problem's own forward saved.

Premises: none. Each problem has its own truth and its own bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from references.masks import intersect
from references.score_mods import ScoreMod, mod_kind_of
from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.comparison import compare, excess
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits, failed
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.refusal import inside
from verify.variant import Support

# name, values, truth, bound (infinite where nothing is promised), dtype
Result = tuple[str, Tensor, Tensor, Tensor, DType]


def relaunched(problem: Problem, support: Support) -> Problem:
    """The same shapes and dtype with other values and, wherever the support has another, scale,
    mask, softcap and strides."""
    layouts = {f"layout_{name}": layout.sibling for name, layout in problem.layouts.items()}
    lengths = (problem.seqlen_q, problem.seqlen_kv)
    found = problem.but(seed=problem.seed ^ 1)
    for changes in (
        {"softmax_scale": _other_scale(problem)},
        {"mask": intersect(*(atom.sibling(*lengths) for atom in problem.mask.atoms))},
        {"score_mod": _other_mod(problem, support)},
        layouts,
    ):
        candidate = found.but(**changes)
        found = candidate if inside(support, candidate) else found
    return found


def _other_mod(problem: Problem, support: Support) -> ScoreMod | None:
    """Another of the same kind, or one that the support has where there is none."""
    if problem.score_mod is not None:
        return problem.score_mod.sibling()
    return next((mod_kind_of(word).gallery()[0] for word in support.score_mods), None)


def _other_scale(problem: Problem) -> float:
    """Half the scale, which kernels must be able to hold in fp32; double the least one; the default
    for 0."""
    half = problem.scale / 2
    if 0 < abs(half) < 2.0 ** dtype_named("float32").emin:
        return problem.scale * 2
    return half or problem.head_dim**-0.5


def judge(trial: Trial) -> Ruling:
    """Its O and LSE within their bounds; then the first problem's bits again."""
    return _judge_relaunch(
        "relaunch", trial, _results, repeats=trial.declaration.contract.deterministic
    )


def _judge_relaunch(
    oracle: str, trial: Trial, results: Callable[[Trial], Iterable[Result]], *, repeats: bool
) -> Ruling:
    """The other problem's results, each within its own bound; then the first problem again, bit for
    bit if a run `repeats`."""
    other = trial.beside("relaunch", relaunched(trial.problem, trial.declaration.support))
    ruling = failed(other)
    if ruling is not None:
        return ruling
    for name, got, want, bound, output in results(other):
        finding = excess(oracle, name, got, want, bound, compare(got, want, bound, output))
        if finding is not None:
            message = (
                f"launched after another problem of its shapes: {finding.message}; now asked:"
                f" {other.problem.name}"
            )
            return Ruling(replace(finding, message=message))
    again = trial.run("relaunched", poison="huge" if repeats else "nan")
    ruling = fault(trial, again)
    if ruling is not None:
        return ruling
    if not repeats:
        return Ruling()
    pairs = [(name, before, again.outputs[name]) for name, before in trial.first.outputs.items()]
    return check_same_bits(oracle, "after another problem of its shapes", pairs)


def _results(trial: Trial) -> Iterator[Result]:
    truth, run = trial.truth, trial.first
    assert run.out is not None
    yield (
        "out",
        run.out,
        truth.out,
        truth.out_bound.masked_fill(truth.empty[..., None], math.inf),
        trial.problem.format_out,
    )
    if run.lse is not None:
        natural = torch.where(truth.empty, 0.0, trial.natural_lse(run.lse))
        yield (
            "lse",
            natural,
            truth.lse.nan_to_num(neginf=0.0),
            truth.lse_bound,
            dtype_named("float32"),
        )


def judge_backward(trial: Trial) -> Ruling:
    """Its dQ, dK and dV, from what its own forward saved, within their bounds; then the first
    problem's bits again."""
    return _judge_relaunch(
        "relaunch_backward",
        trial,
        _gradient_results,
        repeats=trial.declaration.contract.deterministic_backward,
    )


def _gradient_results(trial: Trial) -> Iterator[Result]:
    truth = trial.gradients
    for name, got in trial.first.outputs.items():
        yield name, got, getattr(truth, name), getattr(truth, f"{name}_bound"), trial.problem.format


GROUPS = (
    Group(
        name="relaunch",
        about="another problem of the same shapes, and the first again",
        family="relations",
    ),
    Group(
        name="relaunch_backward",
        about="the gradients of another problem of the same shapes, and of the first again",
        entry="backward",
        family="relations",
    ),
)

FORWARD = Oracle(
    name="relaunch",
    group="relaunch",
    catches=(
        "what is kept of one launch, by shapes or pointers, and applied to the next: scales, masks,"
        " strides, counters"
    ),
    judge=judge,
    needs=frozenset(),
)

BACKWARD = Oracle(
    name="relaunch_backward",
    group="relaunch_backward",
    catches=(
        "what a backward keeps of one launch and applies to the next: scales, masks, strides,"
        " delta, counters"
    ),
    judge=judge_backward,
    needs=frozenset(),
)

ORACLES = (FORWARD, BACKWARD)
