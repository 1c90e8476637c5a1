"""Softcap: measure its form, its order with the scale, and its order with the mask, as the nearest
of many hypotheses.

If the declared arithmetic is too coarse to tell the declared form from another, nothing contradicts
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.premises import Premise
from references.score_mods import cap_of
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.measuring import UNDECIDED, Measured, rounded, run_probe
from verify.judging.trial import Trial

# The hypotheses are computed from the capped products of the visible keys and compared with O.
NEEDS = frozenset(
    {
        Premise.POSITION_FREE_SCORES,
        Premise.VISIBLE_MASS_ONLY,
        Premise.ROWS_AVERAGE_VALUES,
        Premise.EXACT_OUTPUT,
    }
)
_GAIN = 4  # queries times this: scaled scores reach well past the cap
_FORM = "c tanh(s / c)"

# Functions of scaled scores s, raw products r and the cap c.
_FORMS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    _FORM: lambda s, r, c: c * torch.tanh(s / c),
    "ignored": lambda s, r, c: s,
    "s clipped to +-c": lambda s, r, c: s.clamp(-c, c),
    "tanh(s / c) without the factor c": lambda s, r, c: torch.tanh(s / c),
    "c tanh(s)": lambda s, r, c: c * torch.tanh(s),
    "c s / (c + |s|)": lambda s, r, c: c * s / (c + s.abs()),
    "before the scale": lambda s, r, c: (s / r).nan_to_num(0.0) * c * torch.tanh(r / c),
}


def measure(trial: Trial) -> list[Measured]:
    """Measure the form if all keys are visible, else the order with the mask."""
    p = trial.problem
    cap = cap_of(p.score_mod)
    if not cap or not p.seqlen_kv or not p.seqlen_q:
        return []
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    other = _asked(trial)
    q, k, v = (tensor.double() for tensor in other.expanded)
    raw = q @ k.repeat_interleave(p.group, 1).mT
    v = v.repeat_interleave(p.group, 1)
    right = _FORMS[_FORM](raw * p.scale, raw, cap)
    if bool(seen.all()):
        name, declared = "softcap", _FORM
        weights = {
            word: torch.softmax(form(raw * p.scale, raw, cap), -1) for word, form in _FORMS.items()
        }
    else:
        name, declared = "softcap and mask", "the cap, then the mask"
        weights = {
            declared: torch.softmax(right.masked_fill(~seen, -math.inf), -1).nan_to_num(0.0),
            "the mask, then the cap: masked keys weigh exp(-c)": torch.softmax(
                right.masked_fill(~seen, -cap), -1
            ),
            "no mask": torch.softmax(right, -1),
        }
    possible = {word: w @ v for word, w in weights.items()}
    ratios = {word: _ratio(other, value) for word, value in possible.items()}
    # The bounds are those of the declared form, so another form can be slightly outside of them.
    nearest = min(ratios, key=ratios.__getitem__)
    holding = [said for said, ratio in ratios.items() if ratio <= 1]
    word = (
        UNDECIDED
        if len(holding) > 1
        else "something else"
        if nearest == declared and not holding
        else nearest
    )
    evidence = "O is off by " + ", ".join(
        f"{ratio:.3g} bounds from {said}" for said, ratio in ratios.items()
    )
    return [
        Measured(
            name=name,
            word=word,
            declared=declared,
            contradicts=declared not in holding,
            evidence=evidence,
        )
    ]


def _asked(trial: Trial) -> Trial:
    p, inputs = trial.problem, trial.inputs
    q = rounded((inputs.q.double() * _GAIN).clamp(-p.format.max, p.format.max), p)
    return run_probe(trial, "softcap", p, replace(inputs, q=q))


def _ratio(other: Trial, value: Tensor) -> float:
    """Return the largest error of O against a hypothesis in units of the bound, over rows that see
    a key."""
    truth, out = other.truth, other.first.out
    assert out is not None
    ratio = compare(out, value, truth.out_bound, dtype_named(other.problem.dtype_out)).ratio
    live = ~truth.empty
    return float(ratio[live].max()) if bool(live.any()) else 0.0
