"""How far computed scores may stray: products, scales, score mods and narrower formats."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.unit import Unit
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, ForwardArithmetic, U, relative
from verify.tolerance.integers import ScoreErrors
from verify.tolerance.partial_sums import of_product, smaller_in_order, terms_of
from verify.tolerance.row_pass import Linear
from verify.tolerance.score_mods import factor_error, mod_errors, narrow_roundings, size_of
from verify.tolerance.scratch import Room
from verify.tolerance.subnormals import scores_loss

Memory = tuple[Tensor, Tensor]  # of two tensors like the scores

_INTO_FP32 = 2  # roundings of a sum in int32, rounded or cut to fp32
_UNSEEN = 2.0**-80  # 2^-53 of what the best exponential errs by, and less


def largest_score_errors(
    block: RowBlock, a: ForwardArithmetic, problem: Problem, room: Room
) -> Tensor:
    """How far the row maxima may stray, (heads, rows, 1).

    What was made in this room before is lost.
    """
    room.clear(block.scores)
    full = bool(block.visible.all())
    return largest_of(score_errors_of(block, a, problem, full, (room.take(), room.take()))[0])


def product_error(a: ForwardArithmetic, problem: Problem) -> float:
    """Error of the scaled scores by the product itself, per A, at most: operands as rounded, then
    summed."""
    return (1 + a.operand_roundings) * (1 + a.scores.kappa(problem.head_dim)) - 1


def grown(a: ForwardArithmetic, problem: Problem) -> float:
    """What a score may be larger by for its errors."""
    return (1 + product_error(a, problem)) * _grown_scale(a)


def _grown_scale(a: ForwardArithmetic) -> float:
    """What the scale may be larger by for its roundings."""
    return 1 + relative(a.scale_roundings + 3, U)


def scale_overflows(a: ForwardArithmetic, problem: Problem) -> bool:
    """Whether the scale can leave fp32's range before it meets a score.

    A kernel can multiply it by log2(e) and by the factors of Q and K.  Infinity times a product of
    0 is NaN.
    """
    factor = abs(problem.scale) / math.log(2) * a.most_factor
    return factor * _grown_scale(a) >= FP32_MAX


def flushed_score(unit: Unit, problem: Problem, behind: float) -> float:
    """What the flushed products and sums of an fp32 accumulator may cost a score; 0 where that is
    less than fp64 keeps of an exponential's own error.

    behind: what the sum is multiplied by.
    """
    own = unit.underflow(problem.head_dim) if unit.accumulator == "float32" else 0.0
    lost = behind * ((2 * problem.head_dim + 1) * TINY + own)
    return lost if lost >= _UNSEEN else 0.0


def linear_errors(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Linear | None:
    """How far each score may stray, if nothing but its magnitude and its size matters."""
    narrow = a.score_format is not None or a.scores.accumulator != "float32"
    if mod_errors(problem, a) or a.in_order or narrow or a.integers is not None:
        return None
    if flushed_score(a.scores, problem, _behind(a, problem)):
        return None
    cut = scores_loss(block, a.operands, problem)
    if cut is not None:
        cut = cut.masked_fill((block.row_max == -torch.inf)[..., None], 0.0)
    rounding = factor_error(problem, a)
    return replace(_of_products(a, problem), lost=cut).then(1 + rounding, rounding)


def _of_products(a: ForwardArithmetic, problem: Problem) -> Linear:
    """The errors of the products, before the scale's roundings."""
    return Linear(*of_product(a.scores, problem.head_dim, a.operand_roundings))


def _behind(a: ForwardArithmetic, problem: Problem) -> float:
    """What is behind the product: the scale, unless it stood before, and descales."""
    return abs(problem.scale) * a.operands.query * a.operands.key


def score_errors_of(
    block: RowBlock,
    a: ForwardArithmetic,
    problem: Problem,
    full: bool,
    memory: Memory,
    integers: ScoreErrors | None = None,
) -> tuple[Tensor, Tensor]:
    """How far each score may stray, and its size, before the row maximum is subtracted; 0 where
    masked."""
    mod, (first, second) = mod_errors(problem, a), memory
    size = size_of(block.scaled, second)
    rounding = factor_error(problem, a)
    if integers is not None:
        rounding = (1 + rounding) * (1 + relative(_INTO_FP32, U)) - 1
        size.add_(integers.shift)
        error = torch.mul(integers.error, 1 + rounding, out=first).add_(size, alpha=rounding)
        if mod:
            error, size = mod.errors(block, size, error)
        return error.mul_(block.visible), size.mul_(block.visible)
    linear, behind = _of_products(a, problem), _behind(a, problem)
    if not a.in_order:
        linear = linear.then(1 + rounding, rounding)
    error = torch.mul(block.magnitude, linear.a, out=first).add_(size, alpha=linear.b)
    if a.in_order:
        terms = terms_of(block, abs(problem.scale))
        smaller_in_order(error, terms, a.scores, a.operand_roundings)
        error.mul_(1 + rounding).add_(size, alpha=rounding)
    if a.scores.accumulator != "float32":
        error.add_(behind * a.scores.underflow(problem.head_dim) * (1 + rounding))
    flushed = flushed_score(a.scores, problem, behind)
    if flushed:
        error.add_((block.magnitude > 0) * (flushed * (1 + rounding)))
    cut = scores_loss(block, a.operands, problem)
    if cut is not None:
        error.add_(cut.mul_(1 + rounding))
    if a.score_format is not None:
        # As they come, scaled, and on their way into a score mod's function.
        roundings, step = narrow_roundings(problem, a)
        rounding = relative(roundings, a.score_format.unit_roundoff)
        error.mul_(1 + rounding).add_(size, alpha=rounding)
        error.add_(a.score_format.smallest_subnormal * (1 + abs(problem.scale) + step))
    if mod:
        error, size = mod.errors(block, size, error, a.score_format)
    if not full and (
        mod or a.score_format is not None or a.scores.accumulator != "float32" or cut is not None
    ):
        error.mul_(block.visible)
    return error, size


def largest_of(x: Tensor) -> Tensor:
    """The maximum along the keys, (heads, rows, 1); 0 if there are none."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
