"""Predicted errors of dQ, row by row, and of dK and dV, key by key; docs/statistics.md derives
them.

What the forward saved is known, and so are the P and dS that an exact backward would make of it:
errors are counted from the gradients of these (*nominal*), and the place of each rounding's last
digit is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import DType
from verify.arithmetic.unit import Unit
from verify.arithmetic.units import FMA32
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.statistics.rows import (
    UNIFORM,
    WALK,
    Prediction,
    chosen,
    drift,
    exponent_steps,
    half_place,
    rounded_sums,
    summary,
    unsuited,
)
from verify.tolerance.arithmetic import U
from verify.tolerance.gradients_arithmetic import GradientArithmetic, resolve

_TERMS = 8  # visible ones
_EFFECTIVE = 4.0  # (sum |w|)^2 / sum w^2
_SMALL = 0.1  # relative error of weights up to which the first order is enough


@dataclass(frozen=True)
class Given:
    """What a backward starts from, fp64, one entry per query head, (batch * heads_q, ...): q, k, v
    and dout, k and v repeated; saved O and natural LSE (0 where a row is empty), the latter with a
    last dimension of 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class _Weights:
    """Nominal weights (heads, outputs, terms), and the standard deviations of their rounding and of
    their other errors."""

    nominal: Tensor
    rounding: Tensor
    error: Tensor

    @property
    def mT(self) -> _Weights:  # noqa: N802 - as torch calls it
        return _Weights(self.nominal.mT, self.rounding.mT, self.error.mT)


@dataclass(frozen=True)
class _Sum:
    """How weights become a gradient.  heads: query heads in one result; coherent: (heads, outputs,
    dim), the standard deviation of what all terms of an output share: elements of a row may have
    anything in common (`limits`)."""

    unit: Unit
    scale: float
    heads: int
    blocks: int
    cast: bool
    coherent: Tensor | float = 0.0


def gradient_measures(trial: Trial) -> dict[str, float]:
    """Sufficient statistics of some rows of dQ and some keys of dK and dV of a trial's first run;
    none where none is suited."""
    p, declared = trial.problem, trial.declaration.gradients
    if unsuited(p, Premise.LINEAR_SCORES) is not None or declared is None:
        return {}
    work = float(p.batch * p.heads_q * 4 * (p.head_dim + p.head_dim_v))
    rows = chosen(p.seqlen_q, p.batch * p.heads_q, work * p.seqlen_kv, p.seed)
    keys = chosen(p.seqlen_kv, p.batch * p.heads_kv, work * p.seqlen_q, p.seed)
    if not len(rows) or not len(keys):
        return {}
    arithmetic = resolve(declared, trial.config, p, trial.arch)
    if underived(arithmetic) is not None:
        return {}
    with trial.clock.timed("statistics"):
        given = given_of(p, trial.expanded, trial.dout, *trial.start)
        predicted = predictions(p, given, arithmetic, rows, keys)
        found: dict[str, float] = {}
        for name, places in (("dq", rows), ("dk", keys), ("dv", keys)):
            got = trial.first.outputs[name].flatten(0, 1)[:, places]
            found |= summary(name, got, *predicted[name])
    return found


def underived(a: GradientArithmetic) -> str | None:
    """Why errors of an arithmetic are not predicted, or None."""
    if a.own:
        return "softmax: the errors of its row sum and of D are in every key"
    if a.of_weights:
        return "delta_of: the errors of D are in every key"
    if a.prescaled:
        return "prescale: K's roundings are in every row"
    if a.delta is not None:
        return f"delta: its rounding to {a.delta.name} is in every key"
    if a.memory is not None:
        return f"atomics_dtype: sums are rounded to {a.memory.name} on the way"
    if not a.exponential.uniform:
        return "exp: errors that grow with the argument"
    if any(unit.accumulator != "float32" for unit in (a.scores, a.weights, a.score_gradients)):
        return "accumulator: sums are rounded to 16 bits on the way"
    return None


def given_of(
    problem: Problem, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, out: Tensor, lse: Tensor
) -> Given:
    """inputs: q, k and v at their full logical shapes; dout and out (batch, heads_q, seqlen_q,
    head_dim_v), lse natural."""
    q, k, v, dout, out = (x.flatten(0, 1).double() for x in (*inputs, dout, out))
    empty = ~lse.isfinite()
    k, v = (x.repeat_interleave(problem.group, 0) for x in (k, v))
    masked = lse.double().masked_fill(empty, 0.0).flatten(0, 1)[..., None]
    return Given(q, k, v, dout, out.masked_fill(empty.flatten(0, 1)[..., None], 0.0), masked)


def predictions(
    problem: Problem, given: Given, a: GradientArithmetic, rows: Tensor, keys: Tensor
) -> dict[str, tuple[Tensor, Prediction]]:
    """The nominal gradient and the prediction of its errors: "dq" at those rows, "dk" and "dv" at
    those keys, heads folded."""
    g, group = given, problem.group
    _, ds, coherent = _pairs(problem, g, a, rows, torch.arange(problem.seqlen_kv))
    dq = _Sum(a.score_gradients, problem.scale, 1, a.blocks_n, False, coherent)
    p, columns, _ = _pairs(problem, g, a, torch.arange(problem.seqlen_q), keys)
    dk = _Sum(a.score_gradients, problem.scale, group, group * a.blocks_m, a.cast)
    dv = _Sum(a.weights, 1.0, group, group * a.blocks_m, a.cast)
    return {
        "dq": _predicted(ds, g.k, dq, a),
        "dk": _predicted(columns.mT, g.q, dk, a),
        "dv": _predicted(p.mT, g.dout, dv, a),
    }


def _pairs(
    problem: Problem, g: Given, a: GradientArithmetic, rows: Tensor, keys: Tensor
) -> tuple[_Weights, _Weights, Tensor]:
    """P and dS of those rows and keys, (batch * heads_q, rows, keys), and what an error of D makes
    of sums dS K over them."""
    q, dout, out, lse, k, v = (
        *(x[:, rows] for x in (g.q, g.dout, g.out, g.lse)),
        *(x[:, keys] for x in (g.k, g.v)),
    )
    batch, heads = (torch.arange(n) for n in (problem.batch, problem.heads_q))
    mod = problem.mask.mod(problem.seqlen_q, problem.seqlen_kv)
    seen = mod(batch[:, None, None, None], heads[:, None, None], rows[:, None], keys)
    hidden = ~seen.expand(problem.batch, problem.heads_q, len(rows), len(keys)).flatten(0, 1)
    scores, reach, walk = _scaled(q, k, abs(problem.scale))
    p = torch.exp(scores.mul(1.0 if problem.scale >= 0 else -1.0) - lse).masked_fill_(hidden, 0.0)
    relative = drift(a.scores, problem.head_dim) * reach + a.exp
    relative += (U * a.scale_roundings) * scores.abs()
    own = rounded_sums(a.scores, float(problem.head_dim), scores, walk.square())
    relative = (relative.square() + own + exponent_steps(scores.abs(), lse.abs())).sqrt_()
    gradient, reach, walk = _scaled(dout, v, 1.0)
    of_sums = rounded_sums(a.scores, float(problem.head_dim_v), gradient, walk.square()).sqrt_()
    delta = (dout * out).sum(-1, keepdim=True)
    squares = (dout * out).square().sum(-1, keepdim=True)
    of_delta = rounded_sums(FMA32, float(problem.head_dim_v), delta, squares).sqrt_()
    factor = gradient - delta
    ds = p * factor
    error = relative * ds.abs() + p * (
        drift(a.scores, problem.head_dim_v) * reach
        + of_sums
        + of_delta
        + 2 * UNIFORM * U * factor.abs()
    )
    weights = _Weights(p, _rounding(p, a.probability), p * relative)
    rounding = _rounding(ds * a.factor, a.score_gradient) / (a.factor or 1.0)
    if a.rounded:
        rounding = torch.hypot(rounding, weights.rounding * factor)
    return weights, _Weights(ds, rounding, error), of_delta * torch.bmm(p, k).abs()


def _scaled(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """scale x y^T; how large the partial sums of its elements may be: their products are a random
    walk; and the root of the sum of the products' squares."""
    product = torch.bmm(x, y.mT).mul_(scale)
    walk = torch.bmm(x.square(), y.square().mT).sqrt_().mul_(scale)
    return product, torch.add(product.abs(), walk, alpha=WALK), walk


def _rounding(x: Tensor, dtype: DType) -> Tensor:
    """Standard deviation of a cast to dtype; fp32 is none."""
    return (
        torch.zeros_like(x)
        if dtype.precision >= 24
        else (half_place(x, dtype) * UNIFORM).masked_fill_(x == 0, 0.0)
    )


def _predicted(
    w: _Weights, operand: Tensor, rule: _Sum, a: GradientArithmetic
) -> tuple[Tensor, Prediction]:
    """The nominal gradient, heads of a group summed, and the prediction of its errors."""

    def fold(x: Tensor) -> Tensor:
        return x.reshape(len(x) // rule.heads, rule.heads, *x.shape[1:]).sum(1)

    scale, size = abs(rule.scale), w.nominal.abs()
    heads = rule.scale * torch.bmm(w.nominal, operand)
    squares = torch.cat([w.nominal.square(), w.rounding.square(), w.error.square()], 1)
    walk, rounded, others = (
        fold(x) for x in (scale**2 * torch.bmm(squares, operand.square())).chunk(3, 1)
    )
    nominal = fold(heads)
    if rule.cast:
        rounded = rounded + fold((half_place(heads, a.output) * UNIFORM).square())
    reach = nominal.abs() + WALK * walk.sqrt()
    allowance = (
        drift(rule.unit, rule.heads * size.shape[-1]) * reach
        + a.probability.unit_roundoff**2 / 2 * nominal.abs()
    )
    # An exponential may be off by as much in every pair, which nothing divides out again.
    allowance = allowance + (a.exp + U * (2 + a.gradient_roundings)) * nominal.abs()
    variance = rounded + others + rule.blocks * (U * UNIFORM * reach).square()
    variance = variance + (scale * rule.coherent) ** 2
    variance += rounded_sums(rule.unit, float(rule.heads * size.shape[-1]), nominal, walk)
    known = (half_place(nominal, a.output) * UNIFORM).square()
    last = (half_place(nominal.abs() + variance.sqrt() + allowance, a.output) * UNIFORM).square()
    total, powers = fold(size.sum(-1)), fold(size.square().sum(-1))
    suited = (fold((size > 0).sum(-1)) >= _TERMS) & (total.square() >= _EFFECTIVE * powers)
    suited &= fold(w.error.sum(-1)) <= _SMALL * total
    least = known + rounded
    return nominal, Prediction(
        (variance + last).sqrt(),
        allowance,
        least,
        rounded / least,
        rounded + others,
        suited,
        walk > 0,
    )
