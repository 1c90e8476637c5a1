"""Rows of a case: which are judged, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import EVERY_PREMISE, Premise
from verify.arithmetic.dtypes import DType
from verify.arithmetic.unit import NearestChain, Promoted, Unit
from verify.problem import Problem
from verify.problem.premises import broken
from verify.tolerance.arithmetic import U

_STEPS = 3  # fp32 roundings of numbers as large as a score and what is subtracted together
UNIFORM = 3.0**-0.5  # standard deviation of an error that is uniform on (-1, 1)
WALK = 3.0  # standard deviations that partial sums of a random walk stay within

# Scores so finely spread that the rounding errors of different pairs have nothing to do with one
# another, sums of products of both signs, and V that knows nothing of Q and K.  Others repeat keys,
# or have few different scores or V.
SUITED = ("normal", "outliers", "same_sign_v", "v_mean", "one_hot_v", "zero_v_columns")
_EXTREME = 2.0**40
# Predictions hold with factors of the inputs by head, with functions of a score, in any storage.
_NEEDED = EVERY_PREMISE - {
    Premise.PLAIN_INPUTS,
    Premise.LINEAR_SCORES,
    Premise.UNBOUNDED_SCORES,
    Premise.STRIDED_STORAGE,
}
_ROWS = 64  # of one case, at most one per head where there are more heads
_WORK = 3e7  # multiply-adds that the rows of one case may cost


@dataclass(frozen=True)
class Prediction:
    """Per element (..., columns), fp64: sigma, an upper bound of the standard deviation that
    roundings may cause; allowance, what else an honest kernel may be off by; least, a lower bound
    of that deviation's square, of which `share` is due to roundings on the way and not to the last
    one.  of_weights: the part of sigma's square that errors of P, or of dS, make; 0 where they are
    not told apart.  suited: rows (...) whose errors the model describes. judged: elements whose
    errors are not exactly 0 by construction."""

    sigma: Tensor
    allowance: Tensor
    least: Tensor
    share: Tensor
    of_weights: Tensor
    suited: Tensor
    judged: Tensor


def chosen(length: int, heads: int, work: float, seed: int) -> Tensor:
    """Positions of the rows that are judged, evenly spaced; work: multiply-adds of one position of
    all heads."""
    count = min(max(_ROWS // heads, 1), length, int(_WORK // max(work, 1)))
    if count <= 0:
        return torch.zeros(0, dtype=torch.int64)
    step = length // count
    first = seed % step
    return torch.arange(first, first + count * step, step)


def unsuited(problem: Problem, *needed: Premise) -> str | None:
    """Why no row of a problem is judged, or None.  needed: premises besides those that predictions
    of O and LSE need."""
    reason = broken(_NEEDED | set(needed), problem)
    if reason is not None:
        return reason
    if problem.distribution not in SUITED:
        return f"distribution: {problem.distribution}"
    if any(problem.layouts[name].expand for name in "qkv"):
        return "expanded inputs: rows that repeat"
    if not problem.pairs:
        return "no query has a key"
    if problem.scale == 0:
        return "softmax_scale: 0"
    # What is flushed is no rounding.
    ordinary = 1 / _EXTREME <= abs(problem.scale) <= _EXTREME
    return (
        None
        if ordinary
        else f"softmax_scale: {problem.scale}, under which products or gradients may be flushed"
    )


def half_place(x: Tensor, dtype: DType) -> Tensor:
    """Half of a unit in the last place of dtype at |x|: what rounding to nearest is off by, at
    most."""
    exponent = torch.frexp(x)[1].clamp(min=dtype.emin + 1) - 1
    return torch.ldexp(torch.full_like(x, dtype.unit_roundoff), exponent)


def drift(unit: Unit, terms: int) -> float:
    """What a product-sum of so many terms of both signs may be off by, as a part of its largest
    partial sum: a bound of the mean error, and of the root of its mean square.

    A truncated term loses half of its last place on average, its sign being its own: of both signs
    such losses are a random walk.  What conversions lose has the sign of the partial sums.  Of sums
    to nearest it is what operands lose; see `rounded_sums` for the rest.  Units are described in
    `verify.arithmetic.unit`.
    """
    if isinstance(unit, NearestChain):
        return 2 * UNIFORM * unit.operand_error
    length = min(terms, unit.every) if isinstance(unit, Promoted) else terms
    lost = (
        math.ceil(length / unit.products) * 2.0**-unit.output
        + 2 * math.sqrt(length) * 2.0**-unit.fraction
    )
    return UNIFORM * (
        lost + 2 * unit.operand_error + math.sqrt(math.ceil(terms / length)) * 2.0**-24
    )


def drifts(unit: Unit, terms: int, used: Tensor) -> Tensor:
    """The same of terms that may have one sign, whose losses add up; used: how many of them are not
    zero, fp64, any shape."""
    if isinstance(unit, NearestChain):
        return torch.full_like(used, 2 * UNIFORM * unit.operand_error)
    return UNIFORM * unit.kappas(used, terms)


def rounded_sums(unit: Unit, terms: Tensor | float, exact: Tensor, squares: Tensor) -> Tensor:
    """The variance of what sums to nearest round, 0 for other units: of each product and of each
    partial sum, in any order.

    exact: the sums of so many products; squares: the sums of the products' squares.  Of products
    with signs at random any subset's sum has a mean square that is no larger than `squares`, and
    with a trend no larger than that and the square of the whole sum.
    """
    if not isinstance(unit, NearestChain):
        return torch.zeros_like(squares)
    each = (2.0**-unit.fraction * UNIFORM) ** 2
    return each * (terms * (exact.square() + squares) + squares)


def shuffled_sums(unit: Unit, terms: Tensor | float, exact: Tensor, squares: Tensor) -> Tensor:
    """The same, on average over rows, where the places of the terms have nothing to do with their
    values: of features and of keys, as SUITED distributions draw them.

    A partial sum of k of n such products has the mean square k / n squares + k (k - 1) / (n (n -
    1)) (exact^2 - squares); those of a chain, the most of any tree if exact^2 >= squares, add up
    to (n + 1) (exact^2 / 3 + squares / 6).
    """
    if not isinstance(unit, NearestChain):
        return torch.zeros_like(squares)
    each = (2.0**-unit.fraction * UNIFORM) ** 2
    trend = torch.maximum(exact.square(), squares)
    return each * ((terms + 1) * (trend / 3 + squares / 6) + squares)


def exponent_steps(score: Tensor, subtracted: Tensor, more: int = 0) -> Tensor:
    """The variance of what fp32 rounds on the way from a score to its exponential: the product with
    the factor and `more` steps of a score mod; the product with what is subtracted, the maximum or
    LSE, and differences.  Both are sizes."""
    sizes = (1 + more) * score.square() + _STEPS * (score + subtracted).square()
    return (UNIFORM * U) ** 2 * sizes


def joined(
    shape: tuple[int, int], parts: Sequence[tuple[tuple[slice, slice], Prediction]]
) -> Prediction:
    """Predictions of some heads and rows each, put together; shape: of all heads and rows."""
    if len(parts) == 1:
        return parts[0][1]
    whole: dict[str, Tensor] = {}
    for index, part in parts:
        for name in Prediction.__dataclass_fields__:
            own = getattr(part, name)
            whole.setdefault(name, own.new_zeros(*shape, *own.shape[2:]))[index] = own
    return Prediction(**whole)


def summary(name: str, got: Tensor, want: Tensor, predicted: Prediction) -> dict[str, float]:
    """Sufficient statistics of the rows of one tensor, by its name; they add up over cases, workers
    and runs.

    rows: how many; z2, z, toward, slack, least, share, part, weight, weighed: sums over the rows of
    the means over a row's elements of z^2, of z, of z with the sign of the exact value, of the
    allowance's part in z, of error^2 / least, of `share`, of the part of roundings on the way in
    z^2, of w, and of w error^2 / (sigma^2 + allowance^2), where w is the part of errors of weights
    in that.
    """
    return summaries(name, got, want, predicted, 1)[0]


def summaries(
    name: str, got: Tensor, want: Tensor, predicted: Prediction, cases: int
) -> list[dict[str, float]]:
    """`summary` of each of so many cases whose rows are stacked along the first dimension."""
    judged = predicted.judged & predicted.suited[..., None]
    error = (got.double() - want).masked_fill(~judged, 0.0)
    judged = judged & error.isfinite() & (predicted.sigma > 0)
    counts = judged.sum(-1)
    used = (counts > 0).reshape(cases, -1)
    numbers = used.sum(1).tolist()
    if not any(numbers):
        return [{} for _ in range(cases)]
    size = predicted.sigma + predicted.allowance
    z = error / size
    square = predicted.sigma.square() + predicted.allowance.square()
    weight = predicted.of_weights / square
    parts = {
        "z2": z * z,
        "z": z,
        "toward": z * want.sign(),
        "slack": predicted.allowance / size,
        "least": error * error / predicted.least,
        "share": predicted.share,
        "part": predicted.share * predicted.least / size.square(),
        "weight": weight,
        "weighed": weight * error.square() / square,
    }
    stacked = torch.stack([torch.where(judged, part, 0.0).sum(-1) for part in parts.values()])
    means = (stacked / counts).reshape(len(parts), cases, -1)
    # A row that is not used has no mean.
    sums = means.sum(-1).T.tolist()
    for case, number in enumerate(numbers):
        if 0 < number < used.shape[1]:
            sums[case] = means[:, case, used[case]].sum(-1).tolist()
    return [
        {
            f"rows_{name}": float(number),
            **{f"{key}_{name}": value for key, value in zip(parts, own, strict=True)},
        }
        if number
        else {}
        for number, own in zip(numbers, sums, strict=True)
    ]
