"""Key shift: K + 1 w^T adds one number to all scores of a row, so O stays and LSE grows by
scale q . w.

Softmax does not change if all scores of a row grow by the same number. K holds integers in [-2, 2]
and w multiples of a power of two, so the shifted K is exactly representable and the growth of LSE
is known exactly. Each of the two results has its own bound.

Premises: all scores of a row grow by the same number (linear_scores, factors_by_head), and LSE has
no term that does not grow (visible_mass_only).
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
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem.inputs import dequantised
from verify.problem.source import Source


def shifted(trial: Trial) -> Tensor:
    """Return the stored K with one integer vector w per stored head added to all keys, exactly.

    K holds integers in [-2, 2].  w holds multiples of a power of two, so that scores become large.
    """
    problem = trial.problem
    step = 2 ** min(problem.format.precision - 2, 6)
    batch, heads, _, dim = Source(problem).shape("k")
    w = step * Source(problem).integers("k", "shift", -2, 2, (batch, heads, 1, dim)).double()
    return cast(trial.inputs.k.double() + w, problem.format)


def _shifted(trial: Trial) -> Trial:
    """Return the trial with the shifted keys."""
    return trial.noted("shifted", _shift)


def _shift(trial: Trial) -> Trial:
    changed = replace(trial.inputs, k=shifted(trial))
    return trial.beside("shifted", trial.problem, inputs=changed)


def judge(trial: Trial) -> Ruling:
    """Compare O, and LSE after the exactly known growth, within both bounds."""
    p, other = trial.problem, _shifted(trial)
    q, k, _ = dequantised(p, trial.inputs)
    _, moved, _ = dequantised(p, other.inputs)
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
        "a maximum that is not subtracted or is clamped; an LSE without the shift; scores that"
        " saturate"
    ),
    judge=judge,
    launches=first_of(_shifted),
    needs=frozenset({Premise.LINEAR_SCORES, Premise.FACTORS_BY_HEAD, Premise.VISIBLE_MASS_ONLY}),
    concerns=_asked,
)
