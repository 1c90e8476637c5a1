"""The softmax weights that the arithmetic may give instead of P: errors of exponents, exponentials
and row sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.instructions import LOG_ERROR
from verify.problem import Problem
from verify.tolerance import row_pass
from verify.tolerance.arithmetic import TINY, ForwardArithmetic, U, farthest, relative
from verify.tolerance.exact_sums import ExactUnit
from verify.tolerance.integers import ScoreErrors, Steps, score_errors
from verify.tolerance.row_pass import Moved
from verify.tolerance.score_errors import largest_of, linear_errors, score_errors_of
from verify.tolerance.scratch import Room

_ADDITION = -math.log1p(-U)
# exp of more is no number to work with: where a score may be off by that much, only convexity
# bounds O
LARGE = 300.0
DIRECT = 30.0


@dataclass(frozen=True, eq=False)
class Weights:
    """How far the computed softmax weights may stray.  grown, upper: (heads, rows, keys); the
    others (heads, rows, 1).

    delta: bound on |ln(computed / exact weight)|, a shift that the row has in common left out.
    """

    grown: Tensor  # P expm1(delta)
    upper: Tensor  # P exp(delta)
    least: Tensor | None  # the least of it in the row, if that is known
    largest: Tensor  # the largest delta of the row
    moved: Tensor  # the sum of `grown`
    # lower bound of the computed weights' sum, sum_j P exp(-delta); 1 where it is of no use
    total: Tensor
    hopeless: Tensor  # rows whose delta is so large that only convexity bounds O
    keys: Tensor  # visible ones, fp64
    summed: Tensor  # those whose weight is not known to be 0
    share: Tensor  # what a unit that p~ loses may be of the row sum
    # -ln(1 - ls): the computed row sum is between 1 - ls and 1 / (1 - ls) of the sum of the
    # computed weights
    drift: Tensor
    normaliser: Tensor  # the same of what O is divided by
    top: Tensor  # bound on the size of the row maximum, as computed
    lift: Tensor  # g: what errors may multiply or divide the largest p~ by
    growth: Tensor  # g g_1: the same, and that of a rescale
    ahead: Tensor | float  # how far what is subtracted may lie above the row's maximum
    lead: Tensor | float  # e^ahead, the maxima's own errors included
    reach: Tensor  # what p~ may come to, errors included: s e^tau g
    empty: Tensor
    error: Tensor  # E: the largest error of a score of the row
    # bound on |ln(computed / exact product of the rescales behind a block)|, E included
    rescaled: Tensor
    integers: ScoreErrors | None  # where Q and K are rounded to integers

    @property
    def shift(self) -> Tensor | float:
        """Bound on what each score of the row is smaller by in size or larger than the exact one,
        because a mean was subtracted from K."""
        return 0.0 if self.integers is None else self.integers.shift


def weights_of(
    block: RowBlock,
    a: ForwardArithmetic,
    problem: Problem,
    full: bool,
    room: Room,
    above: Tensor | None = None,
    steps: Steps | None = None,
) -> Weights:
    """full: every row sees every key.  above, steps: as in `forward.bound`.

    What was made in this room before is lost.
    """
    room.clear(block.scores)
    memory = room.take(), room.take()
    p, peak = block.probabilities, block.row_max.abs().nan_to_num_(posinf=0.0)[..., None]
    keys = (
        torch.full_like(peak, p.shape[-1])
        if full
        else block.visible.count_nonzero(-1).to(torch.float64)[..., None]
    )
    empty = (block.row_max == -torch.inf)[..., None]
    integers = None
    if a.integers is not None and steps is not None:
        integers = score_errors(block, a.integers, a.scores, problem, steps)
        peak = peak + integers.shift
    strayed = _in_one_pass(block, a, problem, peak, above, memory)
    if strayed is None:
        errors_of_scores = score_errors_of(block, a, problem, full, memory, integers)
        strayed = _in_steps(block, a, problem, errors_of_scores, peak, above, memory)
    moved, error, rescaled = strayed
    largest = moved.largest
    hopeless = (largest >= LARGE) & ~empty
    total, top = torch.where(empty | hopeless, 1.0, moved.total), largest + peak
    ahead = _ahead(a, above, top)
    lift, errors = lifts(a, top + a.offset + ahead)
    share, lead = torch.ones_like(errors), _lead(a, ahead, largest)
    if not a.normalised:
        # The largest p~ is exp(0), but for its errors: the computed row sum is no less, whatever
        # the errors of the scores, and what was lost is rescaled by no more.  Where the scores are
        # good, the exact row sum says more.
        mass = torch.where(empty, 1.0, block.row_sum[..., None])
        known = torch.exp(largest.clamp(max=LARGE)) * errors / (total * mass)
        share = torch.where(hopeless, errors, torch.minimum(known, errors)) * lead
    summed = keys.clamp(max=1.0) if a.one_key else keys
    drift = _row_sum_drift(a, summed, share, problem) + _vanished(keys, errors)
    if a.leads:
        # What is flushed is no longer nothing beside a row sum that may be so small.
        flushed = (keys + a.blocks) * (2 * TINY + a.vanishing) * errors * lead
        drift = drift - torch.log1p(-flushed.clamp(max=1.0))
    normaliser = drift + _divisor_drift(block, a, keys, largest)
    return Weights(
        grown=moved.grown,
        upper=moved.upper,
        least=moved.least,
        largest=largest,
        moved=moved.moved,
        total=total,
        hopeless=hopeless,
        keys=keys,
        summed=summed,
        share=share,
        drift=drift + a.merged * _ADDITION * a.blocks,
        normaliser=normaliser,
        top=top,
        lift=lift,
        growth=errors,
        ahead=ahead,
        lead=lead,
        reach=_reach(a, lift, normaliser - drift),
        empty=empty,
        error=error,
        rescaled=rescaled,
        integers=integers,
    )


def lifts(a: ForwardArithmetic, size: Tensor) -> tuple[Tensor, Tensor]:
    """`Weights.lift` and `Weights.growth` of exponents whose common part has that size at most."""
    rounding = U * size
    lift = torch.exp((a.exps + a.exponent_roundings * rounding).clamp(max=LARGE / 2))
    return lift, lift * torch.exp((a.exps + rounding).clamp(max=LARGE / 2))


def _in_one_pass(
    block: RowBlock,
    a: ForwardArithmetic,
    problem: Problem,
    peak: Tensor,
    above: Tensor | None,
    memory: tuple[Tensor, Tensor],
) -> tuple[Moved, Tensor, Tensor] | None:
    """`_in_steps` of an arithmetic whose exponents stray linearly, where one pass pays; None for
    others, and where an exponent may stray so far that P does not tell what it may become."""
    plain = not (a.slope or a.knows_p) and row_pass.usable(block)
    linear = linear_errors(block, a, problem) if plain else None
    if linear is None:
        return None
    error = row_pass.largest_errors(block, linear)
    common, rounding = _common(a, error, peak, problem, above)
    delta = linear.then(1 + rounding, rounding)
    moved = row_pass.moved_weights(block, delta, common, memory)
    if not bool(moved.largest.max() <= DIRECT):
        return None
    top = error + peak
    return moved, error, _rescaled(a, error, top, top)


def _in_steps(
    block: RowBlock,
    a: ForwardArithmetic,
    problem: Problem,
    scores: tuple[Tensor, Tensor],
    peak: Tensor,
    above: Tensor | None,
    memory: tuple[Tensor, Tensor],
) -> tuple[Moved, Tensor, Tensor]:
    """What the row's weights may become, `Weights.error` and `Weights.rescaled`.  scores: as
    `score_errors_of` gives them, which are lost."""
    p = block.probabilities
    delta, error, rescaled = _exponents(block, a, scores, peak, problem, above)
    largest = largest_of(delta)
    worst = float(largest.max()) if largest.numel() else 0.0
    growth = torch.expm1(delta.clamp(max=LARGE)) if worst > DIRECT else delta.expm1_()
    grown = torch.mul(growth, p, out=memory[1])
    if worst > DIRECT:
        # P may have underflowed where delta is large, and exp(S - LSE + delta) says what it may
        # become.
        exponent = (
            (block.scores - block.lse[..., None] + delta)
            .nan_to_num(nan=-torch.inf)
            .clamp(max=LARGE)
        )
        grown = torch.where(delta > DIRECT, torch.exp(exponent), grown)
    total = torch.div(p, growth.add_(1.0), out=growth).sum(-1, keepdim=True)
    upper = torch.add(p, grown, out=growth)
    return Moved(grown, upper, largest, total, grown.sum(-1, keepdim=True)), error, rescaled


def _ahead(a: ForwardArithmetic, above: Tensor | None, top: Tensor) -> Tensor | float:
    """How far what is subtracted may lie above the row's maximum, whose size is `top` at most."""
    if not a.leads:
        return 0.0
    ahead = torch.zeros_like(top) if above is None else above[..., None]
    return ahead + a.excess + a.step * (top + ahead)


def _lead(a: ForwardArithmetic, ahead: Tensor | float, largest: Tensor) -> Tensor | float:
    """No row's largest p~ is less than one over that: what is ahead, and the row's own errors."""
    if not a.leads:
        return 1.0
    return torch.exp((ahead * (1 + a.slope) + largest).clamp(max=LARGE))


def _vanished(keys: Tensor, growth: Tensor) -> Tensor:
    """-ln(1 - lost): what flushing takes from a row sum that is no less than 1 / g; +inf where it
    may take all."""
    return -torch.log1p(-(keys * 3 * TINY * growth).clamp(max=1.0))


def _reach(a: ForwardArithmetic, lift: Tensor, divisor: Tensor) -> Tensor:
    """s e^tau g, and what a P that is divided by a rounded LSE may grow by."""
    exponent = lift.log() + divisor * (a.by_lse or a.merged)
    return a.reach * torch.exp(exponent.clamp(max=LARGE / 2))


def loss_of(a: ForwardArithmetic) -> float:
    """What rounding to P's dtype and flushing may take from one p~, absolutely."""
    return a.flush + a.vanishing + 2 * TINY


def _exponents(
    block: RowBlock,
    a: ForwardArithmetic,
    scores: tuple[Tensor, Tensor],
    peak: Tensor,
    problem: Problem,
    above: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """delta: how far the exponent of each p~ may stray, in natural units, rescales and the
    exponential's own error included; `Weights.error` and `Weights.rescaled`.

    The row maximum enters as computed, the same in every place, so that only the rounding of the
    subtraction feels it; the roundings of the rescales telescope to that of one subtraction.
    Masked pairs have no more than any other of the row.  scores: as `score_errors_of` gives them,
    which are lost.
    """
    error, size = scores
    most = largest_of(error)
    top = most + peak
    rescaled = _rescaled(a, most, top, largest_of(size) if a.knows_p else top)
    common, rounding = _common(a, most, peak, problem, above)
    if not a.slope:
        delta = error.mul_(1 + rounding).add_(size, alpha=rounding).add_(common)
        return delta, most, rescaled
    distance = (
        (block.row_max[..., None] - block.scores)
        .add_(error)
        .add_(top - peak)
        .nan_to_num_(posinf=0.0)
    )
    if a.leads:
        distance.add_(_ahead(a, above, top))
    error.mul_(1 + rounding).add_(size, alpha=rounding).add_(common)
    delta = error.add_(
        distance.clamp_(max=max(farthest(a.exponential), farthest(a.rescale))), alpha=a.slope
    )
    return delta, most, rescaled


def _common(
    a: ForwardArithmetic, error: Tensor, peak: Tensor, problem: Problem, above: Tensor | None
) -> tuple[Tensor, float]:
    """How far the exponents of a row may stray together; and the relative rounding of each by its
    own score.  error: the largest of a score."""
    top = error + peak
    # The subtraction, and a change of base behind it: 3 roundings, proportional to |x - m| <= |x| +
    # |m|.
    rounding, ahead = relative(3, U), _ahead(a, above, top)
    common = rounding * (top + a.offset + ahead) + (a.exps + a.slope * a.lag)
    if a.sums_rounded:
        # The divisor sums P as it is rounded: a rounding is an error of the weight.
        common = common - math.log1p(-a.probability_roundoff)
        if a.saturates:
            grown = a.exps + a.exponent_roundings * U * (top + a.offset)
            common = common + (grown - math.log(a.saturates)).clamp(min=0.0)
    if a.merged:
        # A part's LSE is a rounded number that exp sees: |m| <= |x| + |m of the row|, |LSE| <= |m|
        # + ln keys.
        logs, more = math.log(max(problem.seqlen_kv, 1)), U * (11 + a.scale_roundings)
        common = common + more * top + (U * 12 * logs + LOG_ERROR * (1 + logs))
        rounding += more
    return common, rounding


def _rescaled(a: ForwardArithmetic, error: Tensor, top: Tensor, size: Tensor) -> Tensor:
    """`Weights.rescaled`.  size: of the row's largest score.

    The differences of maxima behind a block have one sign, so their roundings telescope to one's.
    """
    reach = size + error + top + 2 * a.offset
    lost = relative(3, U) * reach + a.rescales
    return error + lost + a.slope * reach.clamp(max=farthest(a.rescale))


def _row_sum_drift(a: ForwardArithmetic, keys: Tensor, share: Tensor, problem: Problem) -> Tensor:
    """-ln(1 - ls): additions on the longest way of a key into the sum, (1 - u)^n, and a product per
    rescale."""
    if a.ones:
        return torch.zeros_like(keys)
    drift = torch.zeros_like(keys)
    if a.sums_by_unit:
        u = _ADDITION if a.narrow is None else -math.log1p(-a.narrow.unit_roundoff)
        chain = -torch.log1p(-a.values.kappas(keys, problem.seqlen_kv).clamp(max=1.0))
        lost = keys * loss_of(a) * (1 + a.weighted.share) + accumulator_loss(a, problem)
        drift = chain + 2 * a.blocks * u - torch.log1p(-(lost * share).clamp(max=1.0))
    if a.row_sum == "mma":
        return drift
    return torch.maximum(drift, _chain_drift(a, keys, share))


def _chain_drift(a: ForwardArithmetic, keys: Tensor, share: Tensor) -> Tensor:
    """The same of sums in fp32."""
    way = keys
    if a.chain:
        way = keys.clamp(max=(a.blocks if a.running else 1) * a.chain) + (
            a.joins + (0 if a.running else a.blocks)
        )
    drift = (torch.minimum(way, keys) + a.blocks) * _ADDITION
    if a.sums_rounded:
        drift = drift - torch.log1p(-(keys * loss_of(a) * share).clamp(max=1.0))
    return drift


def accumulator_loss(a: ForwardArithmetic, problem: Problem) -> float:
    """What sums of p~ may lose below the normal range of an fp16 accumulator, absolutely; fp32's
    are counted with `TINY`.

    From block to block it is rescaled: the factor, its product and the sum are rounded.
    """
    if a.values.accumulator == "float32" or isinstance(a.values, ExactUnit):
        return 0.0
    own = a.values.underflow(problem.seqlen_kv)
    if a.narrow is None:
        return own
    return (own + 3 * a.blocks * a.narrow.smallest_subnormal / 2) * (
        1 + relative(3 * a.blocks, a.narrow.unit_roundoff)
    )


def _divisor_drift(
    block: RowBlock, a: ForwardArithmetic, keys: Tensor, largest: Tensor
) -> Tensor | float:
    """What O is divided by beside the row sum: a rounded LSE."""
    drift: Tensor | float = 0.0
    if not (a.merged or a.by_lse):
        return drift
    lse = block.lse.abs().nan_to_num_(posinf=0.0)[..., None] + largest
    if a.merged:
        # Merged parts add up to 1 as well as their LSE is known, which is rounded once more.
        drift = (
            U * (4 * lse + 4 * a.blocks)
            + LOG_ERROR * (1 + math.log(a.blocks))
            - math.log1p(-a.rescale.error)
        )
    if a.by_lse:
        # The row's common factor exp(-LSE) is as good as the LSE, which no division makes good.
        logs = torch.log(keys.clamp(min=1.0))
        drift = drift + U * (4 * lse + 6 * logs) + LOG_ERROR * (1 + logs)
    return drift
