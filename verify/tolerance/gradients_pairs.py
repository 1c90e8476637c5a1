"""Pair by pair: the nominal P and dS of what the forward saved, and how far what a backward makes
them of may be off: its scores, its exponents, its dP - D."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.positions import Sizes
from references.row_blocks import RowBlock
from verify.arithmetic.units import FMA32
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, U, farthest, relative, slope_of
from verify.tolerance.extremes import above, below
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_casts import of_score
from verify.tolerance.partial_sums import Terms, of_product, smaller_in_order, terms_of
from verify.tolerance.score_errors import flushed_score
from verify.tolerance.score_mods import factor_error, mod_errors, size_of
from verify.tolerance.scratch import Room
from verify.tolerance.subnormals import scores_loss, whole

_OF_PAIRS = ("scores", "scaled", "magnitude", "visible", "probabilities")  # of a `RowBlock`
_DIRECT = 30.0  # from here on P e^delta is taken as one exponential, for P may have underflowed


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of some heads, fp64: (heads, rows, 1) unless said."""

    q: Tensor  # (heads, rows, head_dim)
    dout: Tensor  # (heads, rows, head_dim_v)
    empty: Tensor  # bool: sees no key
    lse: Tensor  # LSE^, 0 in empty rows
    exact_delta: Tensor  # D of the exact O
    delta: Tensor  # D^ = sum dO O^
    delta_size: Tensor  # sum |dO| |O^|
    flushed: Tensor  # what flushed operands of dP and D^ may take, if they do it below 1
    dout_sizes: Sizes
    value_sizes: Sizes  # of V, (heads, 1, 1)
    # no score, dP or D^ is anywhere near an overflow, and every LSE^ is finite, in base 2 too
    calm: bool
    # bool: a score may overflow, a masked one too, or LSE^ does, and all of the row may be NaN
    lost: Tensor
    right: bool = False  # O^ and LSE^ are the exact ones


def rows_of(
    block: RowBlock,
    given: Sequence[Tensor],
    widest: Tensor | float,
    right: bool = False,
    of_weights: bool = False,
) -> Rows:
    """given: q, dout, O^ and LSE^ (a last dimension of 1); widest: the largest sum of |V| of a key,
    (heads, 1, 1); all fp64.

    right: as in `Rows`.  of_weights: O^ is the exact O, and D^ the sum of the nominal P times dP.
    """
    q, dout, saved_out, saved_lse = given
    empty = (block.row_max == -torch.inf)[..., None]
    out, lse = (x.masked_fill(empty, 0.0) for x in (saved_out, saved_lse))
    parts, size = dout * out, dout.abs().sum(-1, keepdim=True)
    delta, delta_size = parts.sum(-1, keepdim=True), parts.abs_().sum(-1, keepdim=True)
    if of_weights:
        # exp(S - LSE^) is P times what LSE^ is off by, in every key.
        delta = delta * torch.exp(block.lse[..., None].masked_fill(empty, 0.0) - lse)
    lost = torch.zeros_like(empty) if right else ~within_base_2(lse)
    return Rows(
        q=q,
        dout=dout,
        empty=empty,
        lse=lse,
        exact_delta=(dout * block.out).sum(-1, keepdim=True),
        delta=delta,
        delta_size=delta_size,
        flushed=size + out.abs_().sum(-1, keepdim=True) + widest,
        dout_sizes=Sizes.of(dout, -1),
        value_sizes=whole(block.value_sizes),
        calm=bool((((size * widest + delta_size) < FP32_MAX / 4) & lse.isfinite() & ~lost).all()),
        lost=lost,
        right=right,
    )


def within_base_2(lse: Tensor) -> Tensor:
    """Where an LSE is finite, times log2 e too, which a backward in base 2 multiplies it by: bool,
    of its shape."""
    return lse.abs() < FP32_MAX * math.log(2)


@dataclass(frozen=True, eq=False)
class Own:
    """What the row sum and the D of a backward that makes its own softmax may be off by, fp64
    (heads, rows, 1); with a saved LSE, its D alone where that is the sum of P dP."""

    exponent: Tensor  # |ln| of what a weight is divided by, and of the division
    delta: Tensor  # D


@dataclass(frozen=True, eq=False)
class Pairs:
    """Some rows against some keys, fp64: (heads, rows, keys).

    Masked pairs have no weight, but their `factor` and `product` are what a kernel computes before
    it masks them.
    """

    block: RowBlock  # cut to these keys
    rows: Rows
    room: Room
    hidden: Tensor | None  # bool: masked; None if no pair is
    exponent: Tensor  # S - LSE^; -inf where masked
    weights: Tensor  # nominal P, exp(S - LSE^)
    slope: Tensor | None  # of a score mod; 0 where masked; None where it is 1
    factor: Tensor  # nominal dP - D^
    product: Tensor  # B = |dO| |V|^T
    values: Tensor  # V of these keys, (heads, keys, head_dim_v)
    exact: Tensor | None  # dS; None: the nominal one is
    nominal: Tensor  # dS of the nominal P and D^
    size: Tensor  # |nominal|


def pairs_of(
    problem: Problem, block: RowBlock, rows: Rows, values: Tensor, room: Room
) -> Pairs | None:
    """values: V of each head, (heads, keys, head_dim_v), fp64.  What was made in this room before
    is lost.

    None where no pair is visible, nor any so large that a kernel's masked 0 * inf could spread.
    """
    room.clear(block.scores)
    seen = int(block.visible.count_nonzero())
    if not seen and rows.calm:
        return None
    hidden = None if seen == block.visible.numel() else ~block.visible
    exponent = torch.sub(block.scores, rows.lse, out=room.take())
    if hidden is not None:
        exponent.masked_fill_(hidden, -torch.inf)
    weights = block.probabilities if rows.right else torch.exp(exponent, out=room.take())
    gradient, slope, exact = torch.bmm(rows.dout, values.mT, out=room.take()), None, None
    if not rows.right:
        exact = torch.sub(gradient, rows.exact_delta, out=room.take()).mul_(block.probabilities)
    factor = gradient.sub_(rows.delta)
    nominal = torch.mul(weights, factor, out=room.take())
    if problem.score_mod is not None:
        slope = problem.score_mod.slope(block.scores)
    if slope is not None:
        if hidden is not None:
            slope.masked_fill_(hidden, 0.0)
        nominal.mul_(slope)
        if exact is not None:
            exact.mul_(slope)
    if hidden is not None:
        nominal.masked_fill_(hidden, 0.0)
    return Pairs(
        block=block,
        rows=rows,
        room=room,
        hidden=hidden,
        exponent=exponent,
        weights=weights,
        slope=slope,
        factor=factor,
        product=torch.bmm(rows.dout.abs(), values.abs().mT, out=room.take()),
        values=values,
        exact=exact,
        nominal=nominal,
        size=torch.abs(nominal, out=room.take()),
    )


def pairs_by_key(
    problem: Problem, block: RowBlock, rows: Rows, values: Tensor, room: Room, size: int
) -> Iterator[tuple[slice, Pairs | None]]:
    """The pairs of whole rows, so many keys at a time that a tensor has `size` elements: where
    these keys are, and `pairs_of` them, to be read before the next are asked for.  values: V at all
    keys, (heads, seqlen_kv, head_dim_v)."""
    heads, count, keys = block.scores.shape
    step = max(size // max(heads * count, 1), 1)
    for first in range(0, keys, step):
        part = slice(first, min(first + step, keys))
        pairs = {name: getattr(block, name)[..., part] for name in _OF_PAIRS}
        cut = replace(block, **pairs, keys_of_heads=block.keys_of_heads[:, part])
        at = slice(block.keys.start + part.start, block.keys.start + part.stop)
        yield at, pairs_of(problem, cut, rows, values[:, at], room)


def where_positive(x: Tensor, value: Tensor | float) -> Tensor | float:
    """The value, and 0 where x is not positive."""
    return value if above(x, 0.0) else (x > 0) * value


def score_errors(problem: Problem, pairs: Pairs, a: GradientArithmetic) -> tuple[Tensor, Tensor]:
    """Errors of the scaled scores, before a score mod and behind it."""
    mod, block = mod_errors(problem, a), pairs.block
    size = size_of(block.scaled, pairs.room.take())
    roundings = factor_error(problem, a)
    by_size, by_score = of_product(a.scores, problem.head_dim, a.prescaled)
    product = ((1 + a.prescaled) * (1 + a.scores.kappa(problem.head_dim)) - 1) * (1 + roundings)
    before = torch.mul(block.magnitude, by_size, out=pairs.room.take())
    before.add_(size, alpha=by_score)
    if a.in_order:
        smaller_in_order(before, terms_of(block, abs(problem.scale)), a.scores, a.prescaled)
    before.mul_(1 + roundings).add_(size, alpha=roundings)
    flushed = flushed_score(
        a.scores, problem, abs(problem.scale) * a.operands.query * a.operands.key
    )
    if flushed:
        before.add_((block.magnitude > 0) * (flushed * (1 + roundings)))
    cut = scores_loss(block, a.operands, problem)
    if cut is not None:
        before.add_(cut.mul_(1 + roundings))
    if a.coarse and not a.both:
        before.add_(pairs.rows.q.abs().sum(-1, keepdim=True), alpha=a.coarse * (1 + product))
    beyond = None
    if a.scores.accumulator != "float32":
        factor = abs(problem.scale) * a.operands.query * a.operands.key
        before.add_(factor * a.scores.underflow(problem.head_dim) * (1 + roundings))
        limit = a.scores.domain(problem.head_dim) * min(abs(problem.scale), math.log(2))
        beyond = block.magnitude >= limit
        beyond &= block.visible & (problem.scale != 0)
        before.masked_fill_(beyond, torch.inf)
    if a.narrow is not None:
        before = of_score(problem, a, before, size)
    if not mod:
        return before, before
    behind, _ = mod.errors(block, size, before.clone(), a.narrow)
    return before, behind if beyond is None else behind.masked_fill_(beyond, torch.inf)


def exponent_error(pairs: Pairs, a: GradientArithmetic, score: Tensor) -> Tensor:
    """delta: bound on |ln(computed / nominal P)|, the error of the exponential included.

    LSE^ in base 2 is off by two roundings, and so is the difference where that is scaled instead;
    its own subtraction is one.
    """
    reach, u = torch.abs(pairs.exponent, out=pairs.room.take()), relative(4, U) / 4
    if pairs.hidden is not None:
        reach.masked_fill_(pairs.hidden, 0.0)
    reach.add_(score)
    delta = (
        torch.maximum(reach, pairs.rows.lse.abs(), out=pairs.room.take())
        .mul_(2)
        .add_(reach)
        .mul_(u)
    )
    delta.add_(score).sub_(math.log1p(-a.exp))
    if a.exponential.uniform:
        return delta
    return delta.add_(reach.clamp_(max=farthest(a.exponential)), alpha=slope_of(a.exponential))


def grown(problem: Problem, pairs: Pairs, delta: Tensor) -> Tensor:
    """P (e^delta - 1), nominal P; +inf where a score or P itself may overflow."""
    weights = pairs.weights
    far = not below(delta, _DIRECT)
    if far:
        direct = torch.exp(pairs.exponent + delta)
        grown = torch.where(
            delta > _DIRECT, direct, delta.clamp(max=_DIRECT).expm1_().mul_(weights)
        )
    else:
        grown = delta.expm1_().mul_(weights)
    if not (below(grown, FP32_MAX / 2) and below(weights, FP32_MAX / 2)):
        grown.masked_fill_(grown + weights >= FP32_MAX, torch.inf)
    limit = FP32_MAX * min(abs(problem.scale), math.log(2))  # in base 2, too
    if problem.scale and not below(pairs.block.magnitude, limit):
        grown.masked_fill_(pairs.block.magnitude >= limit, torch.inf)
    return grown


def difference_error(
    problem: Problem, pairs: Pairs, a: GradientArithmetic, own: Own | None, reach: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Error of dP and of D^, and where their difference may overflow, None for nowhere: the
    product-sum, which may begin with -D^, and D^ itself.  reach: |dP - D^|."""
    rows, terms = pairs.rows, problem.head_dim_v + 1
    if own is None:
        by_size, by_sum = of_product(FMA32, terms)
        delta = (
            by_size * rows.delta_size
            + by_sum * rows.delta.abs()
            + torch.where(rows.delta_size > 0, _flushed(problem, rows, a), 0.0)
        )
    else:
        delta = own.delta
    if a.delta:
        upper = rows.delta.abs() + delta
        kept = delta + a.delta.unit_roundoff * upper + (upper > 0) * a.delta.smallest_subnormal / 2
        delta = kept.masked_fill(upper >= a.delta.overflow, torch.inf)
    size = torch.add(pairs.product, rows.delta.abs() + delta, out=pairs.room.take())
    limit = FP32_MAX if a.scores.accumulator == "float32" else a.scores.domain(terms)
    # An O^ that is not finite is no less than that.
    overflows = None if below(size, limit) else ~(size < limit)
    # Of P dP and P D the difference is rounded besides.
    by_size, by_sum = of_product(a.scores, terms)
    rounding = by_size + (2 * U if a.sums_delta else 0.0) + a.narrowing(3)
    size.mul_(rounding).add_(reach, alpha=by_sum)
    if a.in_order and a.narrow is None and not a.sums_delta:
        smaller_in_order(size, Terms(rows.dout, pairs.values, pairs.product), a.scores)
    size.add_(_lost_in_product(problem, pairs, a))
    return size.add_(delta * (1 + by_sum)), overflows


def product_error(
    problem: Problem, pairs: Pairs, a: GradientArithmetic, gradient: Tensor
) -> Tensor:
    """Error of dP alone; gradient: |dP|."""
    by_size, by_sum = of_product(a.scores, problem.head_dim_v + 1)
    size = torch.mul(pairs.product, by_size + a.narrowing(2), out=pairs.room.take())
    return size.add_(gradient, alpha=by_sum).add_(_lost_in_product(problem, pairs, a))


def _lost_in_product(problem: Problem, pairs: Pairs, a: GradientArithmetic) -> Tensor | float:
    """What flushed and subnormal operands may take from dP."""
    rows, terms = pairs.rows, problem.head_dim_v + 1
    lost = _flushed(problem, rows, a) + a.factors.loss(terms, rows.dout_sizes, rows.value_sizes)
    if a.scores.accumulator != "float32":
        lost = lost + a.scores.underflow(terms)
    return where_positive(pairs.product, lost)


def _flushed(problem: Problem, rows: Rows, a: GradientArithmetic) -> Tensor:
    return 2 * (problem.head_dim_v + 1) * TINY + max(a.scores.flush, TINY) * rows.flushed
