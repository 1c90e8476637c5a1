"""Gradient sums: sum dV = sum dO, sum dK = 0, <dQ, Q> = <dK, K> and <dV, V> = <dO, O> hold for any
scores.

Each sum covers the rows that see a key, for one key head, with all query heads of its group:

| | holds because | fails with |
|---|---|---|
| sum_j dV_j = sum_i dO_i | sum_j P_ij = 1 | |
| sum_j dK_j = 0 | sum_j dS_ij = sum_j P_ij dP_ij - D_i = 0 | a softcap: its slope multiplies dS |
| <dQ, Q> = <dK, K> | both are s sum_ij dS_ij q_i . k_j | |
| <dV, V> = <dO, O> | both are sum_ij P_ij dO_i . V_j | |

Rows without a key have no P and are left out. The slack is the smaller of two.

The first is the sum of *the elements' bounds*, with the weights of the sum. It is rigorous, since
the exact gradients obey the equations exactly.

The second uses *norms* and no reference (`verify/judging/gradient_invariants.py`). Let a_i = |s|
|q_i| max |k|, B_i = |dO_i| max |V|, delta_i the exponent's error of docs/tolerance-backward.md at
|S| <= a_i, L_i the bound of the saved LSE, and E_i = sum_d |dO_id| |O^_id - O_id|, bounded by the
terms of docs/tolerance.md at their largest. Then

    sum_j |P^_ij - P_ij|   <= w_i = e^(delta_i + L_i) (1 + u_P) - 1 + n (eta_P + 2 t)
    |dP - D|, computed     <= x_i = 2 B_i + E_i + rel(dv + 1)(B_i + E_i)
                                    + kappa(dv + 1)(2 B_i + E_i) + roundings
    sum_j |dS^_ij - dS_ij| <= e_i = e^(delta_i + L_i) (1 + u_dS)(1 + u)^2 slope x_i - 2 B_i
                                    + n (eta_dS + 2 t)

If dS is computed from the rounded P, the first factor of the third line is that of the first line.
If the scale has multiplied dS before its cast, the part that the cast loses is divided by |s|, with
one more rounding. The second line holds because |abc - a'b'c'| is at most the product of the
largest factors less |a'b'c'|, which grows with |dP - D|.

A product whose error is a fraction r of its magnitudes adds r (1 + w_i), or r (2 B_i + e_i). The
slacks are therefore these, and u_o of each output for its rounding:

- for sum dV: sum_i |dO_id| (w_i + r (1 + w_i));
- for sum dK: |s| sum_i |q_id| (e_i + r (2 B_i + e_i));
- for <dQ, Q> - <dK, K>: 2 sum_i a_i (e_i + r (2 B_i + e_i));
- for <dV, V> - <dO, O>: sum_i B_i (w_i + r (1 + w_i)) + E_i.

Emulated honest backwards (`tests/harness/emulation_backward.py`, 6,654 random cases over all
distributions) reach 0.98 of the first slack, 0.63 of the second, 0.27 and 0.66 of the others.

If the backward computes its own softmax, L_i is delta_i plus the errors of a row sum and of a
division, O is exact, and E_i is the largest error of D: B_i (e^(delta_i + L_i) (1 + kappa(dv +
1))(1 + rel(n + 2)) - 1).

By norms, sum dV shows a lost block of keys in fp16 up to some thousand rows. The slacks of the
scalar products are loose by a factor of 100 and more; there the elements' bounds decide, if they
exist. For long sequences, make dO zero except in a few rows: the slack shrinks with their number.

Premises: sum_j P_ij = 1 over the visible keys (rows_average_values, visible_mass_only), the norms
bound the scores (norm_bounded_scores), and the saved O is the kernel's O (exact_output). The sum of
dK also needs linear_scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.judging.compared import noted
from verify.judging.findings import Ruling, convict, first
from verify.judging.gradient_invariants import GradientTensors, Invariant, invariants
from verify.judging.invariants import KNOWN, KNOWN_GRADIENTS, beyond
from verify.judging.launch import Launch
from verify.judging.stacked import joined, stacked, together
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem import Problem
from verify.problem.visibility import measurable
from verify.tolerance.backward import GradientTruth
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients
from verify.tolerance.resolution import resolve
from verify.variant import Declaration

_NOTE = "gradient_sums"


@dataclass(frozen=True)
class _Held:
    """What a case needs whose equations all hold, of that launch and truth."""

    run: Launch
    truth: GradientTruth
    measures: Mapping[str, float]


def judge(trial: Trial) -> Ruling:
    """Check each equation within its slack from norms, and within the sum of the elements'
    bounds."""
    known = noted(trial, _NOTE, _Held, trial.gradients)
    if known is not None:
        return Ruling(measures=known.measures)
    measures, verdict = {}, Ruling()
    for one, slack, ratio in _checked([trial]):
        bad = ~(ratio <= 1)
        measures[f"gradient_sums_{one.name}"] = float(ratio.max()) if ratio.numel() else 0.0
        if verdict.finding is None and bool(bad.any()):
            at = first(bad)
            left, right, most = (float(x[at]) for x in (one.left, one.right, slack))
            where = ", ".join(f"{axis}={i}" for axis, i in zip("bhd", at, strict=False))
            message = (
                f"{one.formula} does not hold at [{where}]: {left:.9g} and {right:.9g}, at most"
                f" {most:.4g} apart; {int(bad.sum())} of {bad.numel()} sums are wrong"
            )
            verdict = convict(
                "gradient_sums", message, name=one.name[:2], bad=bad, got=left, bound=most
            )
    return Ruling(verdict.finding, measures)


def ask_together(stack: Sequence[Trial]) -> None:
    """Check the equations of launched cases of one shape and kernel together, and give their part
    to those for which all of them hold; each of the others has to be judged alone."""
    names, needed = [], []
    for one, _, ratio in _checked(stack):
        names.append(f"gradient_sums_{one.name}")
        none = ratio.new_zeros(len(stack))
        needed.append(ratio.reshape(len(stack), -1).amax(1) if ratio.numel() else none)
    for trial, row in zip(stack, torch.stack(needed, 1).tolist(), strict=True):
        if all(most <= 1 for most in row):
            own = dict(zip(names, row, strict=True))
            trial.notes[_NOTE] = _Held(trial.first, trial.gradients, own)


def _checked(stack: Sequence[Trial]) -> Iterator[tuple[Invariant, Tensor, Tensor]]:
    """Each equation of cases that are stacked along the batch, its slack, and the part of it that
    it needs."""
    cases = _Cases.of(stack)
    trial, p, declared = stack[0], cases.problem, stack[0].declaration
    assert declared.gradients is not None
    forward = resolve(declared.numerics, trial.config, trial.problem, trial.arch)
    backward = resolve_gradients(declared.gradients, trial.config, trial.problem, trial.arch)
    for one in invariants(p, cases.given, forward, backward, len(stack)):
        bounds = summed_bounds(cases, one)
        # A sum with an element that is not judged can be NaN.
        slack = torch.minimum(one.slack, bounds).masked_fill(bounds == math.inf, math.inf)
        error = (one.left - one.right).abs()
        ratio = torch.where((error == 0) | (slack == torch.inf), 0.0, error / slack).nan_to_num(
            nan=torch.inf, posinf=torch.inf
        )
        yield one, slack, ratio


@dataclass(frozen=True, eq=False)
class _Cases:
    """Cases of one shape as one: inputs and results, exact gradients with their bounds, and what O
    is off by, 0 in rows without a key."""

    problem: Problem
    given: GradientTensors
    truth: GradientTruth
    off: Tensor

    @staticmethod
    def of(stack: Sequence[Trial]) -> _Cases:
        p = stack[0].problem if len(stack) == 1 else stacked([trial.problem for trial in stack])
        parts = [(*trial.expanded, trial.dout, *trial.start, *_gradients(trial)) for trial in stack]
        given = GradientTensors(*(together(each) for each in zip(*parts, strict=True)))
        exact = together([trial.truth.out for trial in stack])
        empty = together([trial.truth.empty for trial in stack])
        off = (given.out.double() - exact).abs().masked_fill(empty[..., None], 0.0)
        return _Cases(p, given, joined([trial.gradients for trial in stack]), off)


def _gradients(trial: Trial) -> tuple[Tensor, ...]:
    return tuple(trial.first.outputs[name] for name in ("dq", "dk", "dv"))


def summed_bounds(of: _Cases, one: Invariant) -> Tensor:
    """Return the sum of the elements' bounds in an invariant, which the exact gradients obey
    exactly; infinite if an element may be infinite."""
    p, given, truth = of.problem, of.given, of.truth

    def bound(name: str) -> Tensor:
        exact, most = getattr(truth, name), getattr(truth, f"{name}_bound")
        found: Tensor = most.masked_fill(exact.abs() + most >= p.format.overflow, math.inf)
        return found

    def fold(x: Tensor) -> Tensor:
        return x.reshape(p.batch, p.heads_kv, p.group, *x.shape[2:]).sum(2)

    if one.name in ("dv", "dk"):
        return bound(one.name).sum(2)
    if one.name == "dq":
        found = fold((given.q.double().abs() * bound("dq")).sum((2, 3)))
        found = found + (given.k.double().abs() * bound("dk")).sum((2, 3))
    else:
        found = fold((given.dout.double().abs() * of.off).sum((2, 3)))
        found = found + (given.v.double().abs() * bound("dv")).sum((2, 3))
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _applies(declaration: Declaration) -> str | None:
    if declaration.gradients is None:
        return "declares no gradients"
    known: tuple[str, ...] = (*KNOWN_GRADIENTS, "score_gradient.delta_of")
    if declaration.gradients.products.prescale == "sqrt":
        known = (*known, "products.prescale")
    return beyond(declaration.numerics, KNOWN) or beyond(declaration.gradients, known)


ORACLE = Oracle(
    name="gradient_sums",
    group="gradients",
    catches=(
        "delta of another row, rows or keys that are lost or counted twice, dQ and dK from"
        " different P; at any length"
    ),
    judge=judge,
    together=ask_together,
    excludes=_applies,
    needs=frozenset(
        {
            Premise.ROWS_AVERAGE_VALUES,
            Premise.VISIBLE_MASS_ONLY,
            Premise.NORM_BOUNDED_SCORES,
            Premise.EXACT_OUTPUT,
        }
    ),
    concerns=lambda trial: (
        trial.problem.seqlen_q > 0 and trial.problem.seqlen_kv > 0 and measurable(trial.problem)
    ),
    rank=30,
)
