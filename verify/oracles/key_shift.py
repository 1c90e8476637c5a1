"""Key shift: K + 1 w^T adds the same to every score of a row, so O stays and LSE grows by scale q .
w.

Softmax does not change when all scores of a row rise by the same. K holds integers in [-2, 2] and w
multiples of a power of two, so that the shifted K is exactly representable and the rise of LSE is
known exactly. Each of the two results has its own bound.

Premises: all scores of a row rise alike (linear_scores, factors_by_head), and all that the LSE is
made of rises with them (visible_mass_only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.rounding import cast
from verify.judging.findings import Ruling
from verify.judging.metamorphic import RelatedResult, check_within_bounds, failed, forward_results
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem.inputs import dequantised
from verify.problem.source import Source


def shifted(trial: Trial) -> Tensor:
    """K, as stored, with one integer vector per stored head added to all of its keys, which changes
    no bit but exactly.

    K holds integers in [-2, 2], w multiples of a power of two: large enough that scores beside 0
    become all large.
    """
    problem = trial.problem
    step = 2 ** min(problem.format.precision - 2, 6)
    batch, heads, _, dim = Source(problem).shape("k")
    w = step * Source(problem).integers("k", "shift", -2, 2, (batch, heads, 1, dim)).astype(
        "float64"
    )
    return cast(trial.inputs.k.double().numpy() + w, problem.format)


def judge(trial: Trial) -> Ruling:
    """O within both bounds; LSE too, after the shift, known exactly."""
    p = trial.problem
    changed = replace(trial.inputs, k=shifted(trial))
    other = trial.beside("shifted", p, inputs=changed)
    q, k, _ = dequantised(p, trial.inputs)
    _, moved, _ = dequantised(p, changed)
    w = (moved[:, :, :1].double() - k[:, :, :1].double()).repeat_interleave(p.group, 1)
    rise = p.scale * (q.double() * w).sum(-1)

    def results() -> Iterator[RelatedResult]:
        for r in forward_results(trial, other, own_bounds=True):
            yield replace(r, before=r.before + rise, truth=r.truth + rise) if r.name == "lse" else r

    return failed(other) or check_within_bounds(
        "key_shift", "with one vector added to every key", results()
    )


def _asked(trial: Trial) -> bool:
    return trial.problem.pairs > 0 and not bool(torch.all(trial.truth.empty))


GROUP = Group(
    name="key_shift",
    about="one vector added to every key, exactly",
    family="relations",
    distributions=("small_integers",),
)
ORACLE = Oracle(
    name="key_shift",
    group="key_shift",
    catches=(
        "a maximum that is not subtracted, or clamped; a shift that the LSE forgets; scores that"
        " saturate"
    ),
    judge=judge,
    needs=frozenset({Premise.LINEAR_SCORES, Premise.FACTORS_BY_HEAD, Premise.VISIBLE_MASS_ONLY}),
    concerns=_asked,
)
