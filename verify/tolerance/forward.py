"""Elementwise hard bounds for O and LSE of the forward pass.  The derivation is docs/tolerance.md; names follow it.

An error in a score of `delta` (natural units, relative error of the exponential included) moves a probability by at most a
factor e^(+-delta); what remains are the roundings of P, of the product with V, of the row sum, of the division and of the
output.  Every term is a rigorous worst case, not a first-order one: `e = expm1(delta)`, and the denominators stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.attention import RowBlock
from verify.arithmetic.instructions import LOG_ERROR
from verify.problem import Problem
from verify.tolerance.arithmetic import BEST, FP32_MAX, TINY, ForwardArithmetic, U, relative, resolve

__all__ = ["BEST", "ForwardArithmetic", "ForwardBound", "bound", "resolve"]

U64 = 2.0**-53
_LARGE = 300.0  # exp of more is no number to work with: where a score may be off by that much, only convexity bounds O
_DIRECT = 30.0
_TOP = 4  # keys per row whose share of the Jacobian term is taken exactly
_DIVISION = 5  # in units of U: div.full and div.approx err by 2 ulp, a reciprocal of 2 ulp is multiplied


@dataclass(frozen=True)
class ForwardBound:
    """Tolerances: out (heads, rows, head_dim_v), lse (heads, rows); fp64, and 0 where the result must be exact.

    +inf in the rows whose products may overflow on the way: no number that they hold is wrong.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class _Weights:
    """How far the computed softmax weights may stray.  delta, grown: (heads, rows, seqlen_kv); the others (heads, rows, 1)."""

    delta: Tensor  # bound on |ln(computed / exact weight)|, a shift that the row has in common left out
    largest: Tensor  # its maximum along the row
    grown: Tensor  # P expm1(delta)
    total: Tensor  # lower bound of the computed weights' sum, sum_j P exp(-delta); 1 where it is of no use
    hopeless: Tensor  # rows whose delta is so large that only convexity bounds O
    keys: Tensor  # visible ones, fp64
    row_sum: Tensor  # ls: the computed row sum is between 1 - ls and 1 / (1 - ls) of the sum of the computed weights
    top: Tensor  # bound on the size of the row maximum, as computed
    empty: Tensor


def bound(block: RowBlock, arithmetic: ForwardArithmetic, problem: Problem) -> ForwardBound:
    """The bounds of every output element of a block of whole rows."""
    a, p, size, values = arithmetic, block.probabilities, block.out.abs(), block.values.abs()
    raw = _product_error(block, a, problem)
    w = _weights(block, a, _score_error(block, a, problem, raw))
    # Computed weights are a convex combination too: no weighted sum leaves the range, or the largest magnitude, of V.
    most = values.amax(1, keepdim=True) if values.shape[1] else torch.zeros_like(size[:, :1])
    jacobian = torch.where(w.hopeless, torch.inf, _jacobian(w.grown, block) / w.total)
    jacobian = torch.minimum(jacobian, _range(block))
    upper = (p + w.grown) / w.total
    carried = torch.where(w.hopeless, most, torch.minimum(upper @ values, most))
    growth = torch.exp(2 * (a.exps + U * (w.top + a.offset)).clamp(max=_LARGE / 2))
    lost = torch.minimum(_flushed(block, a, w, growth), torch.where(w.hopeless, torch.inf, upper)) @ values
    product = a.values.kappas(w.keys, problem.seqlen_kv)
    # Rescales, sums of blocks, a division of P; products and sums of a merge.
    fp32 = relative(2 * a.blocks + _DIVISION * a.normalised + (a.blocks + 2) * a.merged, U)
    rounding = (1 + a.probability_roundoff) * (1 + product) * (1 + fp32) - 1
    if a.saturates:
        rounding = rounding + (1 - a.saturates / growth.sqrt()).clamp(min=0.0)
    pre = (jacobian + rounding * carried + lost + w.row_sum * size) / (1 - w.row_sum)
    exact = (size + pre == 0) | w.empty
    last = (0 if a.normalised else _DIVISION) + a.output_roundings
    if last:
        pre = pre + relative(last, U) * (size + pre)
    pre = pre + growth * (2 * w.keys + 2 * a.blocks + 2 + a.output_roundings) * (TINY * a.descale) + a.values.flush
    out = pre + a.output.unit_roundoff * (size + pre) + a.output.smallest_subnormal / 2
    lse = _lse_bound(block, a, w)[..., 0]
    beyond = _overflows(block, a, problem, raw)
    # Sums of un-normalised P V, of which the row maximum only knows that P <= 1; or of normalised ones, which stay near O.
    reach = carried * (1 + rounding) if a.normalised else w.keys * growth * most
    out = out.masked_fill(beyond | (reach * a.probability_scale >= FP32_MAX), torch.inf)
    lse = lse.masked_fill(beyond[..., 0], torch.inf).masked_fill(w.empty[..., 0], 0.0)
    return ForwardBound(out.masked_fill(exact, 0.0), lse)


def _product_error(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """Error of the scaled scores by the product itself, as if it were scaled exactly: operands as rounded, then summed."""
    return block.magnitude * ((1 + a.operand_roundings) * (1 + a.scores.kappa(problem.head_dim)) - 1)


def _score_error(block: RowBlock, a: ForwardArithmetic, problem: Problem, raw: Tensor) -> Tensor:
    """delta: how far the exponent of each p~ may stray, in natural units, rescales and the exponential's own error included.

    The row maximum enters as computed, the same in every place, so that only the rounding of the subtraction feels it; the
    roundings of the rescales telescope to that of one subtraction.
    """
    cap, hidden = problem.softcap, ~block.visible
    size = block.uncapped.abs().masked_fill_(hidden, 0.0)
    rounding = relative(a.scale_roundings + (4 if cap else 1), U)
    error = raw + rounding * (size + raw)
    if a.score_format is not None:
        rounding = relative(2, a.score_format.unit_roundoff)
        error = error + rounding * (size + error) + a.score_format.smallest_subnormal * (1 + abs(problem.scale))
    if cap:
        # tanh contracts, the more the larger the score: towards 0 it gives way most.
        capped = block.scores.abs().masked_fill_(hidden, 0.0)
        error = capped - cap * torch.tanh((size - error) / cap) + 8 * U64 * cap
        size, rounding = capped, (1 + a.tanh) * (1 + relative(4, U)) - 1
        error = error + rounding * (size + error)
    error = error.masked_fill_(hidden, 0.0)
    top = _largest(error) + block.row_max.abs().nan_to_num(posinf=0.0)[..., None]
    # The subtraction, and a change of base behind it: 3 roundings, proportional to |x - m| <= |x| + |m|.
    delta = error + relative(3, U) * (size + error + top + a.offset) + a.exps
    if a.merged:
        # A part's LSE is a rounded number that exp sees: |m| <= |x| + |m of the row|, |LSE| <= |m| + ln keys.
        logs = math.log(max(problem.seqlen_kv, 1))
        delta += U * ((11 + a.scale_roundings) * (size + error + top) + 12 * logs) + LOG_ERROR * (1 + logs)
    return delta.masked_fill_(hidden, 0.0)


def _weights(block: RowBlock, a: ForwardArithmetic, delta: Tensor) -> _Weights:
    p, keys = block.probabilities, block.visible.sum(-1, keepdim=True, dtype=torch.float64)
    largest, empty = _largest(delta), (block.row_max == -torch.inf)[..., None]
    hopeless = (largest >= _LARGE) & ~empty
    small = delta.clamp(max=_LARGE)
    grown = p * torch.expm1(small)
    if bool((largest > _DIRECT).any()):
        # P may have underflowed where delta is large, and exp(S - LSE + delta) says what it may become.
        exponent = (block.scores - block.lse[..., None] + delta).nan_to_num(nan=-torch.inf).clamp(max=_LARGE)
        grown = torch.where(delta > _DIRECT, torch.exp(exponent), grown)
    total = (p * torch.exp(-small)).sum(-1, keepdim=True)
    # Any order of the keys' additions, and a product per rescale: (1 - u)^n.  Merged parts add up to 1 as well as their LSE
    # is known, which is rounded once more.
    adrift = -(keys + a.blocks) * math.log1p(-U)
    if a.merged:
        lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None] + largest
        adrift = adrift + U * (4 * lse + 4 * a.blocks) + LOG_ERROR * (1 + math.log(a.blocks)) - math.log1p(-a.exp)
    if a.by_lse:
        # The row's common factor exp(-LSE) is as good as the LSE, which no division makes good.
        logs = torch.log(keys.clamp(min=1.0))
        adrift = (
            adrift + U * (4 * (block.lse.abs().nan_to_num(posinf=0.0)[..., None] + largest) + 6 * logs) + LOG_ERROR * (1 + logs)
        )
    return _Weights(
        delta=delta,
        largest=largest,
        grown=grown,
        total=torch.where(empty | hopeless, 1.0, total),
        hopeless=hopeless,
        keys=keys,
        row_sum=-torch.expm1(-adrift),
        top=largest + block.row_max.abs().nan_to_num(posinf=0.0)[..., None],
        empty=empty,
    )


def _flushed(block: RowBlock, a: ForwardArithmetic, w: _Weights, growth: Tensor) -> Tensor:
    """What each weight may lose, as a part of the row sum, because small P are rounded absolutely or flushed.

    The largest p~ is exp(0), but for the exponentials' errors and, where a rounded m sigma is subtracted from an exact
    product, for u |m|: the computed row sum is no less, whatever the errors of the scores.  `growth` holds both, twice, since
    what was lost is rescaled too.  Where the scores are good, the exact row sum says more.
    """
    loss = (a.flush + 2 * TINY) * torch.ones_like(growth)
    if not a.normalised:
        mass = torch.where(w.empty, 1.0, block.row_sum[..., None])
        known = torch.exp(w.largest.clamp(max=_LARGE)) * growth / (w.total * mass)
        loss = loss * torch.where(w.hopeless, growth, torch.minimum(known, growth))
    return loss * block.visible


def _overflows(block: RowBlock, a: ForwardArithmetic, problem: Problem, raw: Tensor) -> Tensor:
    """Rows (heads, rows, 1) in which a score may overflow before it is scaled: such a row is outside the arithmetic.

    How large Q and K are alone is not known here.  So fp16 scores under a scale of 0, and fp16 operands that a scale above 1
    multiplies, count as if they overflowed.
    """
    scale = min(abs(problem.scale), 1.0)
    narrow = a.score_format is not None and a.score_format.name == "float16"
    if (narrow and not scale) or (a.prescaled == "float16" and abs(problem.scale) > 1):
        return torch.ones_like(block.row_max, dtype=torch.bool)[..., None]
    beyond = (_largest(block.magnitude) * (1 + a.operand_roundings) >= FP32_MAX * scale) & (scale > 0)
    if narrow and a.score_format is not None:
        size = block.uncapped.abs().masked_fill_(~block.visible, 0.0)
        beyond |= _largest(size + raw) >= a.score_format.overflow * scale
    return beyond


def _largest(x: Tensor) -> Tensor:
    """The maximum along the keys, (heads, rows, 1); 0 if there are none."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def _range(block: RowBlock) -> Tensor:
    """max V - min V over the keys that some row sees, (heads, 1, head_dim_v): no convex combination leaves it."""
    seen = block.visible.any(-2)[..., None]
    if not seen.shape[1]:
        return block.values.new_zeros(block.values.shape[0], 1, block.values.shape[2])
    high, low = block.values.masked_fill(~seen, -torch.inf).amax(1), block.values.masked_fill(~seen, torch.inf).amin(1)
    return (high - low).clamp(min=0.0)[:, None]


def _jacobian(weights: Tensor, block: RowBlock) -> Tensor:
    """An upper bound of sum_j w_j |V_j - O|, elementwise, without the (rows, keys, head_dim_v) tensor.

    The heaviest keys are taken exactly; the rest by the least of three matrix forms: |V| + |O|, centred at the mean of V,
    and Cauchy-Schwarz.  Every pure matrix form fails on peaked rows, where the heavy key has V close to O.
    """
    values, out = block.values, block.out
    keys = values.shape[1]
    if keys == 0:
        return torch.zeros_like(out)
    heads = torch.arange(values.shape[0], device=values.device)[:, None, None]
    heavy, index = weights.topk(min(_TOP, keys), dim=-1)
    exact = (heavy[..., None] * (values[heads, index] - out[..., None, :]).abs()).sum(-2)
    if keys <= _TOP:
        return exact
    rest = weights.scatter(-1, index, 0.0)
    centre = values.mean(1, keepdim=True)
    shifted, target = values - centre, out - centre
    width = values.shape[-1]
    sums = rest @ torch.cat([values.abs(), shifted.abs(), shifted, shifted * shifted], -1)
    plain, centred, first, second = sums.view(*sums.shape[:-1], 4, width).unbind(-2)
    total = rest.sum(-1, keepdim=True)
    # The variance around O cancels: what the fp64 sums may have lost is added, at most (keys + 4) u of twice its parts.
    around = target * target * total
    spread = second - 2 * target * first + around + 2 * (keys + 4) * U64 * (second + around)
    tails = (plain + out.abs() * total, centred + target.abs() * total, (total * spread.clamp(min=0)).sqrt())
    return exact + torch.minimum(torch.minimum(tails[0], tails[1]), tails[2].nan_to_num(nan=torch.inf))


def _lse_bound(block: RowBlock, a: ForwardArithmetic, w: _Weights) -> Tensor:
    """(heads, rows, 1).  LSE = m + ln l: the errors of the row sum and its logarithm, and the fp32 roundings of both terms.

    m enters twice, as subtracted and as added, and may be scaled by differently rounded factors.
    """
    log_sum = torch.where(w.empty, 0.0, torch.log(block.row_sum.clamp(min=1.0))[..., None]) + 2 * w.largest + a.offset
    lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None] + w.largest
    moved = torch.maximum(torch.log1p(w.grown.sum(-1, keepdim=True)), -torch.log(w.total))
    # No log-sum-exp moves by more than its largest score does.
    moved = torch.where(w.largest > _DIRECT, w.largest, torch.minimum(moved, w.largest))
    moved = moved - torch.log1p(-w.row_sum) + 3 * TINY * w.keys
    return moved + U * ((4 + a.scale_roundings) * w.top + 4 * lse + 2 * log_sum) + LOG_ERROR * (1 + log_sum)
