"""A backward whose D is the sum of P dP: what that may be off by, row by row, and so the row sum of
a softmax of its own.

The derivations are docs/tolerance-backward.md, *A softmax of its own* and *D from a saved LSE*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from verify.problem import Problem
from verify.tolerance.arithmetic import ANY_DIVISION, FP32_MAX, TINY, U, relative, vanishing
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_casts import rounding_loss
from verify.tolerance.gradients_pairs import (
    Own,
    Pairs,
    Rows,
    exponent_error,
    grown,
    product_error,
    score_errors,
)

_SUBTRACTION = 3  # of the row maximum, and a change of base behind it


def calm_scores(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether no score of any pair, masked or not, is anywhere near an overflow."""
    largest = [float(x.abs().amax()) if x.numel() else 0.0 for x in (q, k)]
    return largest[0] * largest[1] * problem.head_dim * max(abs(problem.scale), 1.0) < FP32_MAX / 8


def overflowing(problem: Problem, rows: Rows, keys: Tensor) -> Tensor:
    """Rows in which a score may overflow, be it masked, in base 2, or under a scale of 0 that makes
    NaN of it: bool (heads, rows, 1).  keys: (heads, keys, head_dim)."""
    largest = torch.bmm(rows.q.abs(), keys.abs().mT) * max(abs(problem.scale), 1.0)
    return ~(largest < FP32_MAX / 2).all(-1, keepdim=True)


Tiles = Iterable[tuple[slice, Pairs | None]]


def row_sums(
    problem: Problem,
    tiles: Callable[[], Tiles],
    rows: Rows,
    a: GradientArithmetic,
) -> Own | None:
    """What a row's sums over its keys may be off by; None for an arithmetic that needs none."""
    if a.own:
        return own_softmax(problem, tiles(), rows, a)
    return delta_of_weights(problem, tiles(), rows, a) if a.of_weights else None


def guarded(problem: Problem, rows: Rows, keys: Tensor) -> Rows:
    """The rows, told which of them may overflow against these keys, see `overflowing`."""
    lost = rows.lost | overflowing(problem, rows, keys)
    return replace(rows, lost=lost, calm=rows.calm and not bool(lost.any()))


def own_softmax(problem: Problem, tiles: Tiles, rows: Rows, a: GradientArithmetic) -> Own:
    """tiles: all pairs of these rows, as `pairs_by_key` gives them."""
    # Sums over the keys: P e^delta; P (e^delta - 1) |dP - D|; of the largest weights times what dP
    # errs by, and times the largest |dP|; B; 1.  And the largest delta.
    total, spread, missed, reach, sizes, keys, largest = (
        torch.zeros_like(rows.lse) for _ in range(7)
    )
    spoiled = rows.lost.clone()
    for _, pairs in tiles:
        if pairs is None:
            continue
        delta = exponent_error(pairs, a, score_errors(problem, pairs, a)[1])
        if pairs.hidden is not None:
            delta.masked_fill_(pairs.hidden, 0.0)
        largest = torch.maximum(largest, delta.amax(-1, keepdim=True))
        upper = grown(problem, pairs, delta)
        spread += (pairs.factor.abs() * upper).sum(-1, keepdim=True)
        upper.add_(pairs.weights)
        total += upper.sum(-1, keepdim=True)
        gradient = (pairs.factor + rows.delta).abs_()
        error = product_error(problem, pairs, a, gradient)
        missed += (error * upper).sum(-1, keepdim=True)
        if a.rounded:
            loss = rounding_loss(upper, a.probability, pairs.room)
            missed += (loss * gradient).sum(-1, keepdim=True)
            upper.add_(loss)
        reach += gradient.add_(error).mul_(upper).sum(-1, keepdim=True)
        sizes += pairs.product.sum(-1, keepdim=True)
        keys += (
            float(pairs.weights.shape[-1])
            if pairs.hidden is None
            else (~pairs.hidden).sum(-1, keepdim=True)
        )
        # 0 times infinity is part of D
        spoiled |= ~(pairs.product < FP32_MAX / 2).all(-1, keepdim=True)
    # The mean of e^-delta is no less than 1 over that of e^delta.
    total = torch.where(keys > 0, total, 1.0)
    common = (
        relative(_SUBTRACTION, U) * largest
        + torch.expm1(keys * U * (1 + U))
        + relative(ANY_DIVISION, U)
    )
    exponent = total.log() + keys * (2 * TINY + vanishing(a.exponential)) + common
    growth = exponent.exp()
    # A weighted mean of dP by weights that err is off by what they err of dP - D: what all have in
    # common is divided out.
    rounded = torch.expm1(common) + torch.expm1((keys + 2) * U * (1 + U)) + a.narrowing(2)
    delta = spread * total + (missed + rounded * reach) * growth
    delta = delta + TINY * 2 * keys + (TINY + vanishing(a.exponential)) * total * sizes
    delta.masked_fill_(spoiled | ~(reach * growth < FP32_MAX / 2), torch.inf).nan_to_num_(
        nan=torch.inf, posinf=torch.inf
    )
    return Own(exponent.nan_to_num(nan=torch.inf, posinf=torch.inf), delta)


def delta_of_weights(
    problem: Problem,
    tiles: Tiles,
    rows: Rows,
    a: GradientArithmetic,
) -> Own:
    """The D that is the sum of P dP, where P = exp(S - LSE^) of a saved LSE, which nothing divides.

    tiles: all pairs of these rows, as `pairs_by_key` gives them.
    """
    # Sums over the keys, of P' (e^delta - 1) |dP|, of the largest weights times what dP errs by,
    # and times the largest |dP|; of the sizes of the products; and 1.
    missed, reach, sizes, keys = (torch.zeros_like(rows.lse) for _ in range(4))
    spoiled = torch.zeros_like(rows.empty)
    for _, pairs in tiles:
        if pairs is None:
            continue
        delta = exponent_error(pairs, a, score_errors(problem, pairs, a)[1])
        if pairs.hidden is not None:
            delta.masked_fill_(pairs.hidden, 0.0)
        off = grown(problem, pairs, delta)
        upper = off + pairs.weights
        if a.rounded:
            loss = rounding_loss(upper, a.probability, pairs.room)
            off.add_(loss)
            upper.add_(loss)
        gradient = (pairs.factor + rows.delta).abs_()
        error = product_error(problem, pairs, a, gradient)
        missed += (off.mul_(gradient).addcmul_(error, upper)).sum(-1, keepdim=True)
        size = gradient.add_(error)
        reach += upper.mul_(size).sum(-1, keepdim=True)
        seen = 1.0 if pairs.hidden is None else (~pairs.hidden).double()
        sizes += (size * seen).sum(-1, keepdim=True)
        keys += (torch.ones_like(size) * seen).sum(-1, keepdim=True)
        spoiled |= ~(pairs.product < FP32_MAX / 2).all(-1, keepdim=True)  # 0 times infinity
    error = missed + (torch.expm1((keys + 1) * U * (1 + U)) + a.narrowing(2)) * reach
    error = error + 2 * TINY * keys + (2 * TINY + vanishing(a.exponential)) * sizes
    error.masked_fill_(spoiled | ~(reach < FP32_MAX / 2), torch.inf)
    error.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return Own(torch.zeros_like(error), error)
