"""The bound of the natural LSE, and how far it may be off before its last roundings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.instructions import LOG_ERROR
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, ForwardArithmetic, U, relative
from verify.tolerance.forward_maxima import rescaling_blocks
from verify.tolerance.weights import DIRECT, Weights

# Of ln 2 (m + log2 l): its sum, its product, and the constant, which is off by 0.05 of one.
LOG2_ROUNDINGS = 2.1

_LN_2 = math.log(2)


@dataclass(frozen=True)
class LogSum:
    """Of the natural LSE, (heads, rows, 1): its bound, and what it may be off before its last one
    or two roundings; None for the latter where these are not declared."""

    bound: Tensor
    reach: Tensor | None = None

    def where(self, lost: Tensor, settled: Tensor, empty: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bound and reach, (heads, rows): +inf where a row may be lost; a bound of 0 where an LSE
        of -inf is settled; for empty rows there is no reach."""
        bound = self.bound.masked_fill(lost, torch.inf).masked_fill(settled, 0.0)
        if self.reach is None:
            return bound[..., 0], None
        reach = self.reach.nan_to_num(nan=torch.inf)
        return bound[..., 0], reach.masked_fill(bound.isinf() | empty, torch.inf)[..., 0]


def log_sum_of(block: RowBlock, a: ForwardArithmetic, problem: Problem, w: Weights) -> LogSum:
    """LSE = m + ln l: the errors of the row sum and its logarithm, and the fp32 roundings of both
    terms.

    m enters twice, as subtracted and as added, and may be scaled by differently rounded factors,
    unless it is declared that it is not.
    """
    log_sum = (
        torch.where(w.empty, 0.0, torch.log(block.row_sum.clamp(min=1.0))[..., None])
        + 2 * w.largest
        + a.offset
    )
    log_sum = log_sum + w.ahead
    lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None] + w.largest + 2 * w.shift
    moved = torch.maximum(torch.log1p(w.moved), -torch.log(w.total))
    # No log-sum-exp moves by more than its largest score does.
    moved = torch.where(w.largest > DIRECT, w.largest, torch.minimum(moved, w.largest))
    if w.integers is not None:
        moved = moved + w.integers.shift_error
    summed = (
        moved
        + w.drift
        + (2 * TINY + max(TINY, a.vanishing)) * w.keys * (w.share if a.vanishing else 1.0)
    )
    maxima = (4 + a.scale_roundings) * (w.top + a.lag + w.ahead)
    found = summed + U * (maxima + 4 * lse + 2 * log_sum) + LOG_ERROR * (1 + log_sum)
    if not a.log2_sum:
        return LogSum(found)
    if problem.score_mod is None and a.score_format is None and not a.prescaled:
        # Nothing changes the base of a difference: two of the three roundings in `weights_of`.
        peak = block.row_max.abs().nan_to_num(posinf=0.0)[..., None]
        changed = (relative(3, U) - relative(1, U)) * (w.error + peak + a.offset + w.ahead)
        summed = summed - torch.minimum(changed, moved)
    summed = summed - _unchanged(block, a, problem, w).clamp(max=summed)
    apart = U * log_sum * (a.probability_scale != 1)  # log2 l - log2 s
    reach = summed + apart + LOG_ERROR * log_sum.clamp(min=_LN_2)
    last = U * LOG2_ROUNDINGS * (lse + reach)
    return LogSum(torch.fmin(found, reach + last), reach)


def _unchanged(block: RowBlock, a: ForwardArithmetic, problem: Problem, w: Weights) -> Tensor:
    """What `weights_of` allows, of the LSE, for rescales by exp(0) = 1: behind blocks that do not
    change the maximum, if their order is declared; (heads, rows, 1)."""
    none = torch.zeros_like(w.total)
    if not a.rescales_by_one or a.row_sum != "unrounded" or a.ones:
        return none
    changes = rescaling_blocks(block, a, problem, w.error)
    if changes is None:
        return none
    each = U - math.log1p(-a.rescale.error)  # of the product, and of its factor
    return (a.blocks - changes).clamp(min=0.0) * each
