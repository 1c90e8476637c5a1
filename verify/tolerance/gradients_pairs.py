"""Pair by pair: the nominal P and dS of what the forward saved, and how far a backward's own P and dS may be from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.attention import RowBlock
from verify.arithmetic.dtypes import DType
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, U, relative
from verify.tolerance.gradients_arithmetic import GradientArithmetic

_DIRECT = 30.0  # from here on P e^delta is taken as one exponential, for P may have underflowed
_CAP_ROUNDINGS = 4  # behind the tanh, and in front of it with the scale's product: c, 1 / c, the product


@dataclass(frozen=True, eq=False)
class Pairs:
    """One block of rows, fp64: (heads, rows, keys) unless said; per row: (heads, rows, 1).

    Masked pairs have no weight, but their `factor` and `product` are what a kernel computes before it masks them.
    """

    block: RowBlock
    hidden: Tensor  # bool: masked
    q: Tensor  # (heads, rows, head_dim)
    dout: Tensor  # (heads, rows, head_dim_v)
    lse: Tensor  # |LSE^|, per row
    exponent: Tensor  # S - LSE^; -inf where masked
    weights: Tensor  # nominal P, exp(S - LSE^)
    slope: Tensor | None  # 1 - tanh^2 of a softcap; 0 where masked; None without one
    factor: Tensor  # nominal dP - D^
    product: Tensor  # B = |dO| |V|^T
    delta: Tensor  # D^ = sum dO O^, per row
    delta_size: Tensor  # sum |dO| |O^|, per row
    flushed: Tensor  # what flushed operands of dP and D^ may take, if they do it below 1, per row
    exact: Tensor  # dS
    nominal: Tensor  # dS of the nominal P and D^


def pairs_of(problem: Problem, block: RowBlock, values: Tensor, rows: Sequence[Tensor]) -> Pairs:
    """values: V of each head, (heads, keys, head_dim_v); rows: q, dout, O^ and LSE^ (a last dimension of 1), all fp64."""
    hidden, empty = ~block.visible, (block.row_max == -torch.inf)[..., None]
    q, dout, saved_out, saved_lse = rows[0], rows[1], *(x.masked_fill(empty, 0.0) for x in rows[2:])
    exponent = (block.scores - saved_lse).masked_fill_(hidden, -torch.inf)
    weights, slope = torch.exp(exponent), None
    gradient, delta = dout @ values.mT, (dout * saved_out).sum(-1, keepdim=True)
    exact = (gradient - (dout * block.out).sum(-1, keepdim=True)).mul_(block.probabilities)
    factor = gradient.sub_(delta)
    nominal = (weights * factor).masked_fill_(hidden, 0.0)
    if problem.softcap:
        slope = (1 - (block.scores / problem.softcap).square_()).masked_fill_(hidden, 0.0)
        exact.mul_(slope)
        nominal.mul_(slope)
    most = [x.abs().sum(-1, keepdim=True) for x in (dout, saved_out, values)]
    return Pairs(
        block=block,
        hidden=hidden,
        q=q,
        dout=dout,
        lse=saved_lse.abs(),
        exponent=exponent,
        weights=weights,
        slope=slope,
        factor=factor,
        product=dout.abs() @ values.abs().mT,
        delta=delta,
        delta_size=(dout * saved_out).abs().sum(-1, keepdim=True),
        flushed=most[0] + most[1] + (most[2].amax(1, keepdim=True) if values.shape[1] else 0.0),
        exact=exact,
        nominal=nominal,
    )


def errors_of(problem: Problem, pairs: Pairs, a: GradientArithmetic) -> tuple[Tensor, Tensor]:
    """How far P and dS, as they enter the products, may be from the nominal ones: two of (heads, rows, keys)."""
    argument, score = _score_errors(problem, pairs, a)
    upper = _grown(problem, pairs, _exponent_error(pairs, a, score))
    of_p = upper.clone()
    upper.add_(pairs.weights)
    of_p = (
        of_p.add_(_rounding(upper, a.probability)).nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(pairs.hidden, 0.0)
    )
    factor, overflows = _factor_error(problem, pairs, a)
    reach, products = pairs.factor.abs().add_(factor), 1
    # All factors at their largest, P flushed or not, the rounded products, and what these may flush.
    error = upper.add_(upper.clamp(max=TINY)).mul_(reach)
    if pairs.slope is not None:
        error, products = error.mul_(pairs.slope + _slope_error(problem, pairs, a, argument)), 2
    size = pairs.nominal.abs()
    error = error.mul_(1 + relative(products, U)).sub_(size).clamp_(min=0.0).add_(reach > 0, alpha=products * TINY)
    error.add_(_rounding(size.add_(error), a.score_gradient))
    # A masked dP that overflows makes 0 * inf, though not in a row without keys, which nobody computes.
    idle = pairs.hidden & (~overflows | (pairs.block.row_max == -torch.inf)[..., None])
    return of_p, error.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(idle, 0.0)


def _rounding(size: Tensor, dtype: DType) -> Tensor:
    """What a number of fp32 arithmetic, at most that large, may lose by its cast: no more than itself.  fp32 is no cast."""
    u = 0.0 if dtype.precision >= 24 else dtype.unit_roundoff
    lost = torch.minimum((u * size).add_(max(dtype.smallest_subnormal / 2, TINY) + TINY), size)
    return lost.masked_fill_(size >= dtype.overflow, torch.inf)


def _score_errors(problem: Problem, pairs: Pairs, a: GradientArithmetic) -> tuple[Tensor, Tensor]:
    """Errors of the scaled scores, before a softcap and behind it; 0 where masked."""
    cap, hidden, block = problem.softcap, pairs.hidden, pairs.block
    size, raw = block.uncapped.abs().masked_fill_(hidden, 0.0), block.magnitude * a.scores.kappa(problem.head_dim)
    roundings = relative(a.scale_roundings + (_CAP_ROUNDINGS if cap else 1), U)
    before = raw.mul_(1 + roundings).add_(size, alpha=roundings)
    if not cap:
        return before, before
    # tanh contracts, the more the larger the score: towards 0 it gives way most.
    capped = block.scores.abs().masked_fill_(hidden, 0.0)
    behind = capped - cap * torch.tanh((size - before) / cap) + 2.0**-50 * cap
    behind += ((1 + a.tanh) * (1 + relative(_CAP_ROUNDINGS, U)) - 1) * (capped + behind)
    return before, behind.masked_fill_(hidden, 0.0)


def _exponent_error(pairs: Pairs, a: GradientArithmetic, score: Tensor) -> Tensor:
    """delta: bound on |ln(computed / nominal P)|, the error of the exponential included.

    LSE^ in base 2 is off by two roundings, and so is the difference where that is scaled instead; its own subtraction is one.
    """
    reach = pairs.exponent.abs().masked_fill_(pairs.hidden, 0.0).add_(score)
    u = relative(4, U) / 4
    return reach.add_(torch.maximum(reach, pairs.lse), alpha=2).mul_(u).add_(score).sub_(math.log1p(-a.exp))


def _grown(problem: Problem, pairs: Pairs, delta: Tensor) -> Tensor:
    """P (e^delta - 1), nominal P; +inf where a score or P itself may overflow."""
    grown = delta.clamp(max=_DIRECT).expm1_().mul_(pairs.weights)
    far = delta > _DIRECT
    if bool(far.any()):
        grown = torch.where(far, torch.exp(pairs.exponent + delta), grown)
    beyond = grown + pairs.weights >= FP32_MAX
    if problem.scale:
        beyond |= pairs.block.magnitude >= FP32_MAX * min(abs(problem.scale), 1.0)
    return grown.masked_fill_(beyond, torch.inf)


def _factor_error(problem: Problem, pairs: Pairs, a: GradientArithmetic) -> tuple[Tensor, Tensor]:
    """Error of dP - D^, and where that may overflow: the product-sum, which may begin with -D^, D^ itself, the subtraction."""
    terms, flush = problem.head_dim_v + 1, max(a.scores.flush, TINY)
    flushed = 2 * terms * TINY + flush * pairs.flushed
    delta = relative(terms, U) * pairs.delta_size + torch.where(pairs.delta_size > 0, flushed, 0.0)
    size = pairs.product + (pairs.delta.abs() + delta)
    overflows = size >= FP32_MAX
    error = size.mul_(a.scores.kappa(terms)).add_((pairs.product > 0) * flushed).add_(delta)
    error.mul_(1 + U).add_(pairs.factor.abs(), alpha=U)
    return error.masked_fill_(overflows, torch.inf), overflows


def _slope_error(problem: Problem, pairs: Pairs, a: GradientArithmetic, argument: Tensor) -> Tensor:
    """Error of 1 - tanh^2: of its argument, of the tanh as the kernel has it at that place, of the square and the difference.

    The logarithm of 1 - tanh^2 is nowhere steeper than 2, the tanh nowhere steeper than 1.
    """
    assert pairs.slope is not None
    moved, slope = argument / problem.softcap, pairs.slope
    steep = ((slope + 2.0**-50) * torch.expm1((2 * moved).clamp(max=_DIRECT))).masked_fill(2 * moved > _DIRECT, 1.0)
    tangent = ((1 - slope).clamp(min=0.0).sqrt() + moved).clamp(max=1.0)
    function = (1 + a.tanh) * (1 + relative(_CAP_ROUNDINGS, U))
    return (steep.clamp(max=1.0) + (function * function * (1 + U) - 1) * tangent * tangent) * (1 + U) + U * slope
