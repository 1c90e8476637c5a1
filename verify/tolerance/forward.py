"""Elementwise hard bounds for O and LSE of the forward pass.  The derivation is docs/tolerance.md; names follow it.

An error in a score of `delta` (natural units, relative error of the exponential included) moves a probability by at most a
factor e^(+-delta); what remains are the roundings of P, of the product with V, of the row sum, of the division and of the
output.  Every term is a rigorous worst case, not a first-order one: `e = expm1(delta)`, and the denominator stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.attention import RowBlock
from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.instructions import LOG_ERROR, exp_error, tanh_error
from verify.arithmetic.mma import Unit, unit_for
from verify.problem import Problem
from verify.variant import Config, Numerics

U = 2.0**-24  # unit roundoff of the fp32 arithmetic between the two products
TINY = 2.0**-126  # what flush-to-zero may lose
LOG2E = math.log2(math.e)
_LARGE = 300.0  # exp of more is no number to work with; every sum of weights is capped by other means there
_DIRECT = 30.0
_TOP = 4  # keys per row whose share of the Jacobian term is taken exactly
_CANCELLATION = 1e-13  # guard of the fp64 variance below


@dataclass(frozen=True)
class ForwardArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit
    values: Unit
    operand_roundings: float  # relative error of the product of one Q and one K operand before it is summed
    score_roundoff: float  # of a rounding of the scores themselves, 0 if they stay fp32
    score_limit: float  # where a stored score overflows; inf if scores stay fp32
    score_roundings: int  # fp32 roundings proportional to |x|
    probability: DType
    normalised: bool
    exp: float
    tanh: float
    blocks: int  # n_b
    row_sum: float  # ls
    output: DType

    @property
    def flush(self) -> float:
        """eta_P: half the smallest subnormal of P's dtype; fp32 hardware may flush, so nothing under 2**-126 is believed."""
        return max(self.probability.smallest_subnormal / 2, TINY)


def resolve(numerics: Numerics, config: Config, problem: Problem, arch: str) -> ForwardArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is unknown."""
    given = problem.dtype
    operands = given if numerics.operands == "input" else numerics.operands
    probability = given if numerics.probability == "input" else numerics.probability
    block_n = numerics.block_n if numerics.block_n is not None else config.block_n or 16
    keys = max(problem.seqlen_kv, 1)
    blocks = math.ceil(keys / block_n) if block_n else 1
    # Within a block any order of additions, then one per block.
    chain = min(keys, block_n or keys) + blocks
    # A prescaled operand is rounded once more, and so is the factor: of one operand, or of both and its square root.
    prescaled = {"none": 0, "q": 2, "sqrt": 6}[numerics.prescale]
    tf32 = numerics.float32_products == "tf32" and arch != "cpu"
    return ForwardArithmetic(
        scores=unit_for(arch, "tf32" if tf32 and operands == "float32" else operands),
        values=unit_for(arch, "tf32" if tf32 and probability == "float32" else probability),
        operand_roundings=prescaled * dtype_named(operands).unit_roundoff,
        score_roundoff=0.0 if numerics.scores == "float32" else dtype_named(given).unit_roundoff,
        score_limit=math.inf if numerics.scores == "float32" else dtype_named(given).overflow,
        score_roundings=3 + numerics.scale_roundings,
        probability=dtype_named(probability),
        normalised=numerics.normalised,
        exp=exp_error(numerics.exp),
        tanh=tanh_error(numerics.softcap_tanh) if problem.softcap else 0.0,
        blocks=blocks,
        row_sum=math.expm1(chain * math.log1p(U)),
        output=dtype_named(given),
    )


# The tightest arithmetic of an honest kernel, everything between the inputs and O in fp32: what bounds are printed beside.
BEST = Numerics(probability="float32", block_n=0)


@dataclass(frozen=True)
class ForwardBound:
    """Tolerances: out (heads, rows, head_dim_v), lse (heads, rows); fp64, and 0 where the result must be exact."""

    out: Tensor
    lse: Tensor


def bound(block: RowBlock, arithmetic: ForwardArithmetic, problem: Problem) -> ForwardBound:
    """The bounds of every output element of a block of whole rows."""
    a, p = arithmetic, block.probabilities
    exact_delta = _score_error(block, a, problem)
    delta = exact_delta.clamp(max=_LARGE)
    e = torch.where(block.visible, torch.expm1(delta), 0.0)
    pe = _grown(block, p * e, delta)
    shrink = (p * torch.exp(-delta)).sum(-1, keepdim=True)
    empty = ~block.visible.any(-1, keepdim=True)
    den = torch.where(empty, 1.0, shrink * (1 - a.row_sum))
    worst = 1 + e.amax(-1, keepdim=True) if e.shape[-1] else torch.ones_like(den)
    magnitude_out, values = block.out.abs(), block.values.abs()
    # Computed weights are a convex combination too: no weighted sum leaves the range, or the largest magnitude, of V.
    top = values.amax(1, keepdim=True) if values.shape[1] else torch.zeros_like(magnitude_out)

    jacobian = torch.minimum(_jacobian(pe, block) / den, _range(block))
    u_p, n = a.probability.unit_roundoff, problem.seqlen_kv
    product = a.values.kappa(n)
    weight = u_p + product * (1 + u_p) + a.blocks * U
    pre = jacobian + weight * torch.minimum(((p + pe) @ values) / den, top)
    pre = pre + a.row_sum * torch.minimum(worst * magnitude_out / den, top)
    # The largest computed weight is exp(0) = 1: whatever the scores' errors, the computed row sum is no less than 1 - ls.
    mass = torch.where(empty, 1.0, block.row_sum[..., None])
    lost = (a.flush * worst + 2 * TINY) / (den * mass)
    lost = torch.minimum(lost, torch.full_like(lost, (a.flush + 2 * TINY) / (1 - a.row_sum)))
    if a.normalised:
        lost = torch.full_like(lost, a.flush + 2 * TINY)
    pre = pre + lost * (block.visible.to(p.dtype) @ values) + a.values.flush
    pre = pre + 3 * U * (magnitude_out + pre)
    out = pre + a.output.unit_roundoff * (magnitude_out + pre) + a.output.smallest_subnormal / 2
    out = torch.where((magnitude_out + pre > 0) & ~empty, out, 0.0)
    lse = _lse_bound(block, a, (pe.sum(-1), shrink[..., 0], exact_delta), empty[..., 0])
    if a.score_limit < math.inf and problem.scale:
        # Scores that are stored in fp16 before they are scaled may overflow there: such a row is outside that arithmetic.
        beyond = (block.magnitude.amax(-1) / abs(problem.scale) >= a.score_limit) if e.shape[-1] else empty[..., 0]
        out, lse = out.masked_fill(beyond[..., None], math.inf), lse.masked_fill(beyond, math.inf)
    return ForwardBound(out, lse)


def _grown(block: RowBlock, plain: Tensor, delta: Tensor) -> Tensor:
    """P expm1(delta); where delta is large P may have underflowed, and exp(S - LSE + delta) says what it may become."""
    if not bool((delta > _DIRECT).any()):
        return plain
    exponent = (block.scores - block.lse[..., None] + delta).nan_to_num(nan=-torch.inf).clamp(max=_LARGE)
    return torch.where(delta > _DIRECT, torch.exp(exponent), plain)


def _score_error(block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor:
    """delta: how far the exponent of each p~ may stray, in natural units, rescales and the exponential's own error included.

    The row maximum enters as computed, the same in every place, so that only the rounding of the subtraction feels it; the
    roundings of the rescales telescope to that of one subtraction.
    """
    size = block.scores.abs().masked_fill(~block.visible, 0.0)
    top = block.row_max.abs().nan_to_num(posinf=0.0, neginf=0.0)[..., None]
    product = (a.scores.kappa(problem.head_dim) + a.operand_roundings) * block.magnitude
    if problem.softcap:
        # tanh contracts: an error before it is no larger behind it.
        product = product + (a.tanh + 3 * U) * size + U * block.uncapped.abs().masked_fill(~block.visible, 0.0)
    rounded = product + U * (a.score_roundings * size + top) + a.score_roundoff * (size + product)
    return rounded + (1 + a.blocks) * a.exp


def _range(block: RowBlock) -> Tensor:
    """max V - min V over all keys, (heads, 1, head_dim_v): a convex combination cannot leave it."""
    if not block.values.shape[1]:
        return block.values.new_zeros(block.values.shape[0], 1, block.values.shape[2])
    return (block.values.amax(1) - block.values.amin(1))[:, None]


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
    spread = second - 2 * target * first + target * target * total
    spread = spread + _CANCELLATION * (second + target * target * total)
    tails = (plain + out.abs() * total, centred + target.abs() * total, (total * spread.clamp(min=0)).sqrt())
    return exact + torch.minimum(torch.minimum(tails[0], tails[1]), tails[2])


def _lse_bound(block: RowBlock, a: ForwardArithmetic, moves: tuple[Tensor, Tensor, Tensor], empty: Tensor) -> Tensor:
    """LSE = m + ln l: the row sum's relative error, the logarithm's, and the fp32 roundings of the two terms and their sum."""
    grow, shrink, delta = moves
    shrink = torch.where(empty, 1.0, shrink)
    log_sum = torch.where(empty, 0.0, torch.log(block.row_sum.clamp(min=1.0)))
    top = block.row_max.abs().nan_to_num(posinf=0.0, neginf=0.0)
    lse = block.lse.abs().nan_to_num(posinf=0.0, neginf=0.0)
    moved = torch.maximum(torch.log1p(grow), -torch.log(shrink))
    if delta.shape[-1]:
        # No log-sum-exp moves by more than its largest score does.
        largest = delta.masked_fill(~block.visible, 0.0).amax(-1)
        moved = torch.where(largest > _DIRECT, largest, torch.minimum(moved, largest))
    roundings = U * (2 * top + log_sum + lse) + LOG_ERROR * (1 + log_sum)
    return torch.where(empty, 0.0, moved + a.row_sum / (1 - a.row_sum) + roundings)
