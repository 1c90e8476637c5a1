"""Pair by pair: how far a backward's own P and dS, as they enter its products, may be from the
nominal ones, and where they lie if their roundings are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, U, relative, vanishing
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_casts import of_score_gradient, of_slope, rounding_loss
from verify.tolerance.gradients_known import Known, rounded_to, settled
from verify.tolerance.gradients_pairs import (
    Own,
    Pairs,
    difference_error,
    exponent_error,
    grown,
    score_errors,
    where_positive,
)
from verify.tolerance.score_mods import mod_errors


@dataclass(frozen=True, eq=False)
class Errors:
    """How far P and dS, as they enter the products, may be from the nominal ones, (heads, rows,
    keys); and where they lie if their roundings are known."""

    of_p: Tensor
    of_ds: Tensor
    p: Known | None = None
    ds: Known | None = None


def errors_of(
    problem: Problem,
    pairs: Pairs,
    a: GradientArithmetic,
    own: Own | None = None,
    sharp: bool = False,
) -> Errors:
    """The errors of these pairs, and with `sharp` what is known of their roundings.

    own: of these rows, where the arithmetic sums D over them.  Raises ValueError where it is
    missing.
    """
    if a.sums_delta and own is None:
        raise ValueError(
            "D is the sum of P dP: its error is one of whole rows, which are not given"
        )
    argument, score = score_errors(problem, pairs, a)
    delta = exponent_error(pairs, a, score)
    of_p = grown(problem, pairs, delta if own is None else delta.add_(own.exponent))
    if vanishing(a.exponential):
        of_p.add_(vanishing(a.exponential))
    known_p = (
        rounded_to(a.probability, pairs.weights, of_p, pairs.room) if sharp and a.knows_p else None
    )
    upper = torch.add(of_p, pairs.weights, out=pairs.room.take())
    of_p.add_(rounding_loss(upper, a.probability, pairs.room)).nan_to_num_(
        nan=torch.inf, posinf=torch.inf
    )
    if a.rounded:
        upper = torch.add(of_p, pairs.weights, out=upper)
    reach = torch.abs(pairs.factor, out=pairs.room.take())
    factor, overflows = difference_error(problem, pairs, a, own, reach)
    factor.mul_(1 + U).add_(reach, alpha=U)
    if overflows is not None:
        factor.masked_fill_(overflows, torch.inf)
    reach.add_(factor)
    slope = None if pairs.slope is None else _steepest(problem, pairs, a, argument)
    error = _product_error(pairs, a, upper, reach, slope, pairs.size)
    known_ds = None
    if sharp and a.knows_ds:
        centre = pairs.nominal, error
        if a.rounded and known_p is not None:
            centre = _of_rounded(pairs, a, known_p, reach, slope)
        known_ds = rounded_to(a.score_gradient, *centre, pairs.room, a)
    upper = torch.add(pairs.size, error, out=pairs.room.take())
    of_score_gradient(problem, a, upper, error, pairs.room)
    if a.alpha:
        upper = torch.add(pairs.size, error, out=upper)
        error.masked_fill_(upper >= FP32_MAX / 2 / a.alpha, torch.inf)
        lost = upper.clamp_(max=2 * TINY / a.alpha)  # what dS times the scale loses
        error.add_(lost)
        if known_ds is not None:
            known_ds.half.add_(lost)
    error.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    _mask(pairs, overflows, own, of_p, error)
    return Errors(
        of_p,
        error,
        known_p and settled(known_p, pairs.weights, of_p, pairs.hidden),
        known_ds and settled(known_ds, pairs.nominal, error, pairs.hidden),
    )


def _of_rounded(
    pairs: Pairs, a: GradientArithmetic, known: Known, reach: Tensor, slope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The dS of a P that is known, not yet cast, and how far a kernel's may be from it."""
    centre = torch.mul(known.middle, pairs.factor, out=pairs.room.take())
    if pairs.slope is not None:
        centre.mul_(pairs.slope)
    largest = torch.add(known.middle, known.half, out=pairs.room.take())
    return centre, _product_error(pairs, a, largest, reach, slope, centre.abs())


def _mask(
    pairs: Pairs, overflows: Tensor | None, own: Own | None, of_p: Tensor, of_ds: Tensor
) -> None:
    """Errors where pairs are hidden, and where nothing is asked of a row."""
    if pairs.hidden is not None:
        # A masked dP that overflows makes 0 * inf, but not in a row without keys, which no kernel
        # computes.
        of_p.masked_fill_(pairs.hidden, 0.0)
        unasked = pairs.rows.empty & (own is None)
        of_ds.masked_fill_(
            pairs.hidden if overflows is None else pairs.hidden & (~overflows | unasked), 0.0
        )
        lost = ~pairs.rows.lse.isfinite()
        if bool(lost.any()):  # and a masked score of -inf, less such an LSE^, may be NaN
            for moved in (of_p, of_ds):
                moved.masked_fill_(pairs.hidden & lost, torch.inf)
    if bool(pairs.rows.lost.any()):
        of_p.masked_fill_(pairs.rows.lost, torch.inf)
        of_ds.masked_fill_(pairs.rows.lost, torch.inf)


def _steepest(problem: Problem, pairs: Pairs, a: GradientArithmetic, argument: Tensor) -> Tensor:
    """What the slope of a score mod may be at most, as computed."""
    mod = mod_errors(problem, a)
    assert mod is not None
    assert pairs.slope is not None
    moved = mod.f.slope_error(pairs.slope, argument, *of_slope(mod, a))
    return pairs.slope + (moved * (1 + U) + U * pairs.slope)


def _product_error(
    pairs: Pairs,
    a: GradientArithmetic,
    upper: Tensor,
    reach: Tensor,
    slope: Tensor | None,
    size: Tensor,
) -> Tensor:
    """How far dS, not yet cast, may be from a product of that size; in the memory of `upper`.

    All factors at their largest (P, |dP - D|, the slope), P flushed or not, the rounded products,
    and what these may flush.  Softmax's own backward may be P dP - P D, two products and their
    difference.
    """
    products = (1 if slope is None else 2) + 2 * a.sums_delta
    error = upper.add_(torch.clamp(upper, max=TINY, out=pairs.room.take())).mul_(reach)
    if slope is not None:
        error.mul_(slope)
    error.mul_(1 + relative(products, U)).sub_(size).clamp_(min=0.0)
    return error.add_(where_positive(reach, products * TINY))
