"""Relaunch: another problem of the same shapes in the same process is right too, and does not
change the first problem's results.

The second problem runs in the same process and over the same memory. It has the same shapes and
dtype, other values and, if the support allows it, another scale, mask, softcap and strides. Its
results must be within its own bounds, although the first problem ran before it. Then the first
problem runs again: it must give the same bits, although the second ran before it. If a kernel does
not declare that runs repeat, only the bounds are checked.

Backward: the same holds for dQ, dK and dV, from the saved results of the second problem's forward.

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
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.refusal import inside
from verify.variant import Support

# name, values, truth, bound (infinite where nothing is promised), dtype
Result = tuple[str, Tensor, Tensor, Tensor, DType]


def relaunched(problem: Problem, support: Support) -> Problem:
    """Return a problem of the same shapes and dtype with other values and, if the support allows
    it, another scale, mask, softcap and strides."""
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
    """Return another score mod of the same kind; if there is none, one that the support has."""
    if problem.score_mod is not None:
        return problem.score_mod.sibling()
    return next((mod_kind_of(word).gallery()[0] for word in support.score_mods), None)


def _other_scale(problem: Problem) -> float:
    """Return half the scale; double the scale if half is subnormal in fp32; the default for 0."""
    half = problem.scale / 2
    if 0 < abs(half) < 2.0 ** dtype_named("float32").emin:
        return problem.scale * 2
    return half or problem.head_dim**-0.5


def _other(trial: Trial) -> Trial:
    """Return the trial of the other problem."""
    return trial.noted(
        "relaunch",
        lambda one: one.beside("relaunch", relaunched(one.problem, one.declaration.support)),
    )


def _poison(repeats: bool) -> str:
    return "huge" if repeats else "nan"


def _launches(trial: Trial) -> tuple[Wanted, ...]:
    """The other problem, then the first one again."""
    contract = trial.declaration.contract
    backward = trial.entry == "backward"
    repeats = contract.deterministic_backward if backward else contract.deterministic
    return (Wanted(_other(trial)), Wanted(trial, "relaunched", _poison(repeats)))


def judge(trial: Trial) -> Ruling:
    """Check O and LSE of another problem within bounds, then the first problem's bits again."""
    return _judge_relaunch(
        "relaunch", trial, _results, repeats=trial.declaration.contract.deterministic
    )


def _judge_relaunch(
    oracle: str, trial: Trial, results: Callable[[Trial], Iterable[Result]], *, repeats: bool
) -> Ruling:
    """Check the other problem's `results` within their bounds; then run the first problem again and
    compare its bits, if `repeats`."""
    other = _other(trial)
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
    again = trial.run("relaunched", poison=_poison(repeats))
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
    """Check dQ, dK and dV of another problem within bounds, then the first problem's bits again."""
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
        about="another problem of the same shapes, and then the first problem again",
        family="relations",
    ),
    Group(
        name="relaunch_backward",
        about="gradients of another problem of the same shapes, and then of the first again",
        entry="backward",
        family="relations",
    ),
)

FORWARD = Oracle(
    name="relaunch",
    group="relaunch",
    catches=(
        "state of one launch, cached by shapes or pointers, that the next launch uses: scales,"
        " masks, strides, counters"
    ),
    judge=judge,
    launches=_launches,
    needs=frozenset(),
)

BACKWARD = Oracle(
    name="relaunch_backward",
    group="relaunch_backward",
    catches=(
        "state of one backward launch that the next launch uses: scales, masks, strides, delta,"
        " counters"
    ),
    judge=judge_backward,
    launches=_launches,
    needs=frozenset(),
)

ORACLES = (FORWARD, BACKWARD)
