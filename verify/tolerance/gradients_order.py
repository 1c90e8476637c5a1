"""Gradients whose terms come in a declared order: how large their partial sums are on the way, and
what a sum may be off by because of that.

The derivation is docs/tolerance-backward.md, *Sums in a declared order*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.mma import NearestChain, Unit
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.gradients_pairs import Pairs
from verify.tolerance.partial_sums import precision

STEP = 16  # neighbouring terms, among which no order is declared
_LOST = 2.0**-125  # what fp32 may lose of a weight, and of its product, below the normal range
_COARSE = 2.0**-22  # what a term costs a partial sum in fp32, and more


def steps_of(first: int, count: int) -> Iterator[slice]:
    """Terms from the `first` on, by their place among these, cut at multiples of `STEP`."""
    start = 0
    while start < count:
        stop = min(start + STEP - (first + start) % STEP, count)
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True, eq=False)
class Partial:
    """The partial sums of one gradient of some query heads while its terms are added, not scaled.

    (heads, outputs, dim), in the dtype of `precision`; steps: (heads, outputs, 1); most: a number.
    """

    running: Tensor  # the sum so far
    walked: Tensor  # the sum of |running| behind each step that has a visible pair
    largest: Tensor  # of |running|
    spare: Tensor  # memory
    steps: Tensor  # how many have a visible pair
    most: Tensor  # the largest |operand|

    @staticmethod
    def zeros(heads: int, like: Tensor, turned: bool) -> Partial:
        """For as many outputs as `like`, (heads, outputs, dim), has; turned: as in `Sums.zeros`."""
        outputs, dim = like.shape[1:]
        dtype = precision(like)
        whole, steps = (
            like.new_zeros(count, heads, *((n, outputs) if turned else (outputs, n)), dtype=dtype)
            for count, n in ((4, dim), (1, 1))
        )
        if turned:
            whole, steps = whole.mT, steps.mT
        running, walked, largest, spare = whole
        return Partial(running, walked, largest, spare, steps[0], like.new_zeros((), dtype=dtype))

    def part(self, outputs: slice) -> Partial:
        """The same tensors at some outputs."""
        running, walked, largest, spare, steps = (
            x[:, outputs] for x in (self.running, self.walked, self.largest, self.spare, self.steps)
        )
        return Partial(running, walked, largest, spare, steps, self.most)

    def add(self, weights: Tensor, operand: Tensor, visible: Tensor | None, first: int) -> None:
        """Add nominal weights (heads, outputs, terms) times an operand (heads, terms, dim).

        visible: as the weights, None for all.  first: the place of the first term among all of its
        head; these come in ascending order.
        """
        if not operand.numel():
            return
        weights, operand = (x.to(self.running.dtype) for x in (weights, operand))
        torch.maximum(self.most, operand.abs().amax(), out=self.most)
        for part in steps_of(first, operand.shape[1]):
            self.running.baddbmm_(weights[..., part], operand[:, part])
            torch.abs(self.running, out=self.spare)
            torch.maximum(self.largest, self.spare, out=self.largest)
            if visible is None:
                self.walked.add_(self.spare)
                self.steps.add_(1.0)
                continue
            seen = visible[..., part].any(-1, keepdim=True).to(self.spare.dtype)
            self.walked.addcmul_(self.spare, seen)
            self.steps.add_(seen)


def walk(
    pairs: Pairs,
    keys: Tensor,
    first: tuple[int, int],
    dq: Partial | None,
    dk: Partial | None,
    dv: Partial | None,
) -> None:
    """Each pair's share of the partial sums that are asked for.

    keys: K of these pairs, (heads, keys, head_dim).  first: their first row and key.
    """
    visible, rows = None if pairs.hidden is None else pairs.block.visible, pairs.rows
    seen = None if visible is None else visible.mT
    if dq is not None or dk is not None:
        slopes = pairs.nominal.to(precision(keys))
        if dq is not None:
            dq.add(slopes, keys, visible, first[1])
        if dk is not None:
            dk.add(slopes.mT, rows.q, seen, first[0])
    if dv is not None:
        dv.add(pairs.weights.to(precision(keys)).mT, rows.dout, seen, first[0])


@dataclass(frozen=True)
class InOrder:
    """How the terms of a gradient are added: by which unit, with the relative error that a term has
    before, and the number of roundings behind; whole_first: as the order of that name."""

    unit: Unit
    term: float
    roundings: int
    whole_first: bool


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Of one gradient: of each query head its nominal sum; of each result the sum of sizes with the
    errors of weights, the latter alone, and the visible pairs."""

    sums: Tensor
    reach: Tensor
    error: Tensor
    terms: Tensor


def error_in_order(
    partial: Partial, rule: InOrder, given: Magnitudes, fold: Callable[[Tensor], Tensor]
) -> Tensor:
    """What the sums err by, final roundings included, errors of weights and flushes apart.

    fold: from query heads to results.
    """
    unit, leaf = rule.unit, (1 + rule.term) * (1 + 2 * rule.unit.operand_error)
    leaf = leaf * (1 + relative(rule.roundings, U)) - 1
    each = unit.kappa(STEP) - 2 * unit.operand_error
    steps, sizes = fold(partial.steps.double()), given.reach * (1 + leaf)
    growth = torch.exp(each * (steps + 2)) * (1 + steps * _COARSE)
    # How far the partial sums of a kernel may be from those that were computed.
    away = given.error + leaf * given.reach
    away.add_(given.reach * ((given.terms + 2) * _COARSE))
    away.add_(given.terms * ((1 + partial.most.double()) * _LOST))
    whole = fold(given.sums)
    if whole is not given.sums:  # what other heads have left in the accumulator
        away.add_(whole.abs_(), alpha=0.5).add_(fold(given.sums.abs()), alpha=0.5)
    walked = fold(partial.walked.double()).addcmul_(away, steps).add_(sizes, alpha=0.5)
    if rule.whole_first:
        walked.add_(fold(partial.largest.double().mul_(partial.steps)), alpha=2.0)
    error = walked.mul_(each)
    if isinstance(unit, NearestChain):  # products that are rounded alone
        error.add_(sizes, alpha=2.0**-unit.fraction)
    error.mul_(growth * (1 + relative(rule.roundings, U)))
    return error.add_(given.reach, alpha=leaf)
