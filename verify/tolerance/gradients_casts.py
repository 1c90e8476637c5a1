"""What casts may take from scores and from dS, pair by pair: the declared ones, and all those that
a backward of unknown arithmetic may have (docs/tolerance-backward.md, *An unknown backward*)."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, U
from verify.tolerance.extremes import below
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.score_mods import ModErrors, narrow_roundings
from verify.tolerance.scratch import Room

_CASTS = 4  # of dS: P times what, the scale, and a product of the kernel's own on either side
_MORE_CASTS = 3  # behind a score mod: its factor, its slope, its divisor


def of_score(problem: Problem, a: GradientArithmetic, error: Tensor, size: Tensor) -> Tensor:
    """The error of a score that is rounded as it comes, scaled, and on its way into a score mod.

    error: without these roundings; size: |score|; both (heads, rows, keys).
    """
    assert a.narrow is not None
    roundings, step = narrow_roundings(problem, a)
    rounding = a.narrowing(roundings)
    lost = a.narrow.smallest_subnormal * (1 + abs(problem.scale) + step)
    return error * (1 + rounding) + size * rounding + lost


def of_slope(mod: ModErrors, a: GradientArithmetic) -> tuple[float, float]:
    """The factor of f(s) as computed, and the unit roundoff of the slope that is made of it."""
    if a.narrow is None:
        return mod.result, U
    return 1 + mod.coarse("result", mod.result - 1, a.narrow)[0], a.narrow.unit_roundoff


def of_score_gradient(
    problem: Problem, a: GradientArithmetic, upper: Tensor, error: Tensor, room: Room
) -> None:
    """Add to the error of dS what its casts may lose.

    upper: no dS is larger, error included; it is lost.
    """
    if a.narrow is not None:  # one cast before and one behind the scale among them
        casts = _CASTS + (_MORE_CASTS if problem.score_mod is not None else 0)
        unscaled = 1 / abs(problem.scale) if problem.scale else 1.0
        lost = casts * a.narrow.smallest_subnormal * max(1.0, unscaled)
        error.add_(upper * a.narrowing(casts)).add_(upper.clamp(max=lost))
        upper = upper * (1 + a.narrowing(casts))
    if a.factor != 1:
        error.add_(upper, alpha=U)
        scaled = upper.add_(upper, alpha=U).mul_(a.factor)
        error.add_(rounding_loss(scaled, a.score_gradient, room).div_(a.factor))
    else:
        error.add_(rounding_loss(upper, a.score_gradient, room))


def rounding_loss(size: Tensor, dtype: DType, room: Room) -> Tensor:
    """What a number of fp32 arithmetic, at most that large, may lose by its cast: no more than
    itself.  fp32 is no cast."""
    u = 0.0 if dtype.precision >= 24 else dtype.unit_roundoff
    lost = torch.mul(size, u, out=room.take()).add_(max(dtype.smallest_subnormal / 2, TINY) + TINY)
    torch.minimum(lost, size, out=lost)
    return (
        lost
        if below(size, dtype.overflow)
        else lost.masked_fill_(size >= dtype.overflow, torch.inf)
    )
