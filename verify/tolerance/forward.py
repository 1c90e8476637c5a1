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
from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.instructions import LOG_ERROR, exp_error, tanh_error
from verify.arithmetic.mma import Unit, unit_for
from verify.problem import Problem
from verify.variant import Config, Numerics

U = 2.0**-24  # unit roundoff of the fp32 arithmetic between the two products
U64 = 2.0**-53
TINY = 2.0**-126  # what flush-to-zero may lose
FP32_MAX = (2 - 2.0**-23) * 2.0**127
_LARGE = 300.0  # exp of more is no number to work with: where a score may be off by that much, only convexity bounds O
_DIRECT = 30.0
_TOP = 4  # keys per row whose share of the Jacobian term is taken exactly
_DIVISION = 5  # in units of U: div.full and div.approx err by 2 ulp, a reciprocal of 2 ulp is multiplied

_PRESCALE = {"none": 0, "q": 2, "sqrt": 6}  # roundings of one operand and its factor; of both, and a square root


@dataclass(frozen=True)
class ForwardArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit
    values: Unit
    prescaled: str  # dtype of operands that the scale has multiplied; "" if it multiplies scores
    operand_roundings: float  # relative error of the product of one Q and one K operand before it is summed
    score_format: DType | None  # what scores are rounded to, before and after they are scaled; None: they stay fp32
    scale_roundings: int  # fp32 roundings in the factor of the scores
    probability: DType
    normalised: bool
    exp: float
    tanh: float
    blocks: int  # n_b
    output: DType
    by_lse: bool = False  # P = exp(S - LSE), with the LSE rounded
    merged: bool = False  # keys are split among programs whose normalised results are merged by their fp32 LSE

    @property
    def flush(self) -> float:
        """eta_P: half the smallest subnormal of P's dtype; fp32 hardware may flush, so nothing under 2**-126 is believed."""
        return max(self.probability.smallest_subnormal / 2, TINY)

    @property
    def probability_roundoff(self) -> float:
        """u_P; P is computed in fp32, so a P that stays fp32 is not rounded once more."""
        return 0.0 if self.probability.precision >= 24 else self.probability.unit_roundoff

    @property
    def exps(self) -> float:
        """|ln(1 + eps)| of a key's own exponential and of the rescales that follow its block (and of the merge)."""
        return -(self.blocks + self.merged) * math.log1p(-self.exp)


def resolve(numerics: Numerics, config: Config, problem: Problem, arch: str) -> ForwardArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is unknown or not derived."""
    given = problem.dtype
    operands = given if numerics.operands == "input" else numerics.operands
    probability = given if numerics.probability == "input" else numerics.probability
    for name, value, possible in (
        ("accumulator", numerics.accumulator, ("float32",)),
        ("prescale", numerics.prescale, tuple(_PRESCALE)),
        ("scores", numerics.scores, ("float32", "input")),
        ("float32_products", numerics.float32_products, ("ieee", "tf32", "tf32x3")),
        ("normaliser", numerics.normaliser, ("sum", "lse")),
    ):
        if value not in possible:
            raise ValueError(f"numerics.{name}: no bound is derived for {value!r}, only for {', '.join(possible)}")
    block_n = numerics.block_n if numerics.block_n is not None else config.block_n or 16
    keys = max(problem.seqlen_kv, 1)
    blocks = math.ceil(keys / block_n) if block_n else 1
    float32 = "float32" if numerics.float32_products == "ieee" or arch == "cpu" else numerics.float32_products
    return ForwardArithmetic(
        scores=unit_for(arch, float32 if operands == "float32" else operands),
        values=unit_for(arch, float32 if probability == "float32" else probability),
        prescaled="" if numerics.prescale == "none" else operands,
        operand_roundings=_relative(_PRESCALE[numerics.prescale], dtype_named(operands).unit_roundoff),
        score_format=dtype_named(given) if numerics.scores == "input" and given != "float32" else None,
        scale_roundings=numerics.scale_roundings,
        probability=dtype_named(probability),
        normalised=numerics.normalised,
        by_lse=numerics.normaliser == "lse",
        merged=numerics.split_keys,
        exp=exp_error(numerics.exp),
        tanh=tanh_error(numerics.softcap_tanh) if problem.softcap else 0.0,
        blocks=blocks,
        output=dtype_named(given),
    )


# The tightest arithmetic of an honest kernel, everything between the inputs and O in fp32: what bounds are printed beside.
BEST = Numerics(probability="float32", block_n=0)


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
    growth = torch.exp(2 * (a.exps + U * w.top).clamp(max=_LARGE / 2))
    lost = torch.minimum(_flushed(block, a, w, growth), torch.where(w.hopeless, torch.inf, upper)) @ values
    product = a.values.kappas(w.keys, problem.seqlen_kv)
    # Rescales, sums of blocks, a division of P; products and sums of a merge.
    fp32 = _relative(2 * a.blocks + _DIVISION * a.normalised + (a.blocks + 2) * a.merged, U)
    rounding = (1 + a.probability_roundoff) * (1 + product) * (1 + fp32) - 1
    pre = (jacobian + rounding * carried + lost + w.row_sum * size) / (1 - w.row_sum)
    exact = (size + pre == 0) | w.empty
    if not a.normalised:
        pre = pre + _relative(_DIVISION, U) * (size + pre)
    pre = pre + growth * (2 * w.keys + 2 * a.blocks + 2) * TINY + a.values.flush
    out = pre + a.output.unit_roundoff * (size + pre) + a.output.smallest_subnormal / 2
    lse = _lse_bound(block, a, w)[..., 0]
    beyond = _overflows(block, a, problem, raw)
    # Sums of un-normalised P V, of which the row maximum only knows that P <= 1; or of normalised ones, which stay near O.
    reach = carried * (1 + rounding) if a.normalised else w.keys * growth * most
    out = out.masked_fill(beyond | (reach >= FP32_MAX), torch.inf)
    lse = lse.masked_fill(beyond[..., 0], torch.inf).masked_fill(w.empty[..., 0], 0.0)
    return ForwardBound(out.masked_fill(exact, 0.0), lse)


def _relative(count: int, u: float) -> float:
    """(1 + u)^count - 1: what `count` roundings of unit roundoff u may add up to."""
    return math.expm1(count * math.log1p(u))


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
    relative = _relative(a.scale_roundings + (4 if cap else 1), U)
    error = raw + relative * (size + raw)
    if a.score_format is not None:
        relative = _relative(2, a.score_format.unit_roundoff)
        error = error + relative * (size + error) + a.score_format.smallest_subnormal * (1 + abs(problem.scale))
    if cap:
        # tanh contracts, the more the larger the score: towards 0 it gives way most.
        capped = block.scores.abs().masked_fill_(hidden, 0.0)
        error = capped - cap * torch.tanh((size - error) / cap) + 8 * U64 * cap
        size, relative = capped, (1 + a.tanh) * (1 + _relative(4, U)) - 1
        error = error + relative * (size + error)
    error = error.masked_fill_(hidden, 0.0)
    top = _largest(error) + block.row_max.abs().nan_to_num(posinf=0.0)[..., None]
    # The subtraction, and a change of base behind it: 3 roundings, proportional to |x - m| <= |x| + |m|.
    delta = error + _relative(3, U) * (size + error + top) + a.exps
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
    log_sum = torch.where(w.empty, 0.0, torch.log(block.row_sum.clamp(min=1.0))[..., None]) + 2 * w.largest
    lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None] + w.largest
    moved = torch.maximum(torch.log1p(w.grown.sum(-1, keepdim=True)), -torch.log(w.total))
    # No log-sum-exp moves by more than its largest score does.
    moved = torch.where(w.largest > _DIRECT, w.largest, torch.minimum(moved, w.largest))
    moved = moved - torch.log1p(-w.row_sum) + 3 * TINY * w.keys
    return moved + U * ((4 + a.scale_roundings) * w.top + 4 * lse + 2 * log_sum) + LOG_ERROR * (1 + log_sum)
