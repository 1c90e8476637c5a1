"""Product by product: gradients as sums of weights times operands, and the bounds of their
elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DTYPES, DType
from verify.arithmetic.mma import Unit
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, U, relative
from verify.tolerance.extremes import above, below
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_order import InOrder, Magnitudes, Partial, error_in_order
from verify.tolerance.partial_sums import saved
from verify.tolerance.subnormals import Lost, Weighted


@dataclass(frozen=True, eq=False)
class Weights:
    """(heads, outputs, terms); moved: nominal - exact, None for 0."""

    exact: Tensor
    moved: Tensor | None
    size: Tensor  # |nominal|

    @property
    def mT(self) -> Weights:  # noqa: N802 - as torch calls it
        return Weights(self.exact.mT, None if self.moved is None else self.moved.mT, self.size.mT)


@dataclass(eq=False)
class Sums:
    """One gradient of some query heads while it is added up, not yet scaled.

    (heads, outputs, dim); terms, and `sums`, the same without the operand: (heads, outputs, 1).
    """

    exact: Tensor
    moved: Tensor  # nominal - exact
    size: Tensor  # sums of |nominal weight| |operand|
    errors: list[Tensor]  # the same of the weights' errors, for each arithmetic
    terms: Tensor  # visible pairs
    sums: list[Tensor]  # of |nominal weight|, and of the errors
    # with known roundings of the first arithmetic: the middles less the exact weights, and the
    # half-widths, times the operand (its size)
    known: list[Tensor]
    # of the finished sums, what `_others` gives, by arithmetic and query heads in one result
    others: dict[tuple[int, int], Others] = field(default_factory=dict)
    partial: Partial | None = None  # where some arithmetic declares an order

    @staticmethod
    def zeros(
        heads: int,
        like: Tensor,
        arithmetics: int,
        turned: bool = False,
        known: bool = False,
        ordered: bool = False,
    ) -> Sums:
        """For as many outputs as `like`, (heads, outputs, dim), has.  turned: the weights come
        transposed, to which a product with transposed results is quicker.  known: some roundings
        are; ordered: the order of the terms is."""
        outputs, dim = like.shape[1:]
        count, shapes = (
            3 + arithmetics,
            [(n, outputs) if turned else (outputs, n) for n in (dim, 1)],
        )
        whole = like.new_zeros(count + 2 * known, heads, *shapes[0])
        single = like.new_zeros(count, heads, *shapes[1])
        if turned:
            whole, single = whole.mT, single.mT
        errors, middle = list(whole[3:count]), list(whole[count:])
        partial = Partial.zeros(heads, like, turned) if ordered else None
        return Sums(
            whole[0],
            whole[1],
            whole[2],
            errors,
            single[0],
            list(single[2:]),
            middle,
            partial=partial,
        )

    def part(self, outputs: slice) -> Sums:
        """The same tensors at some outputs."""
        exact, moved, size, terms = (
            x[:, outputs] for x in (self.exact, self.moved, self.size, self.terms)
        )
        return Sums(
            exact,
            moved,
            size,
            [x[:, outputs] for x in self.errors],
            terms,
            [x[:, outputs] for x in self.sums],
            [x[:, outputs] for x in self.known],
            partial=self.partial and self.partial.part(outputs),
        )

    def add(
        self,
        weights: Weights,
        errors: Sequence[Tensor],
        operand: Tensor,
        visible: Tensor | None,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Add weights and their errors, (heads, outputs, terms), times an operand (heads, terms,
        dim); None: all visible.  known: as the sums of that name, with one arithmetic at least."""
        magnitude = operand.abs()
        self.exact.baddbmm_(weights.exact, operand)
        if weights.moved is not None:
            self.moved.baddbmm_(weights.moved, operand)
        for product, total, size in zip(
            (self.size, *self.errors), self.sums, (weights.size, *errors), strict=True
        ):
            product.baddbmm_(size, magnitude)
            total.add_(size.sum(-1, keepdim=True))
        if known is not None:
            self.known[0].baddbmm_(known[0], operand)
            self.known[1].baddbmm_(known[1], magnitude)
        self.terms += operand.shape[1] if visible is None else visible.count_nonzero(-1)[..., None]


@dataclass(frozen=True)
class Rule:
    """How the sums of one gradient become its elements."""

    unit: Unit
    length: int  # terms in one query head, masked ones included
    blocks: int  # partial sums in one query head
    heads: int  # query heads in one result
    cast: bool  # their sums are rounded to the output's dtype before they are added
    scale: float
    roundings: int
    output: DType
    weighted: Weighted
    operand: float = 0.0  # relative error of what the weights are multiplied by
    coarse: float = 0.0  # what it may lose below the normal range, times the scale
    memory: DType | None = None  # in which partial sums are added up, scaled, if that is not fp32
    order: str = "any"  # of the terms


def rules_of(problem: Problem, a: GradientArithmetic) -> dict[str, Rule]:
    """Of "dq", "dk" and "dv"."""
    n, m, group = problem.seqlen_kv, problem.seqlen_q, problem.group
    scaled = (problem.scale, a.gradient_roundings + 1, a.output)  # the scale itself is rounded too
    of_ds = Weighted(a.score_gradients, a.score_gradient, a.score_gradient, m * group)
    of_p = Weighted(a.weights, a.probability, a.probability, m * group)
    of_k = replace(of_ds, length=n, multiplied=1 / a.operands.key)
    of_q = replace(of_ds, multiplied=1 / a.operands.query)
    by_q = (a.prescaled, a.coarse) if a.both or a.alpha else (0.0, 0.0)
    rules = {
        "dq": Rule(
            a.score_gradients,
            n,
            a.blocks_n,
            1,
            False,
            *scaled,
            of_k,
            operand=a.prescaled,
            coarse=a.coarse,
        ),
        "dk": Rule(a.score_gradients, m, a.blocks_m, group, a.cast, *scaled, of_q, *by_q),
        "dv": Rule(
            a.weights, m, a.blocks_m, group, a.cast, 1.0, a.gradient_roundings, a.output, of_p
        ),
    }
    return {
        name: replace(rule, memory=a.memory if name in a.atomics else None, order=a.order_of(name))
        for name, rule in rules.items()
    }


def results(sums: Sums, rules: Sequence[Rule]) -> list[Tensor]:
    """The exact gradient and the bound of each arithmetic, query heads of a group summed."""
    exact = rules[0].scale * _fold(sums.exact, rules[0].heads)
    return [exact, *(_bound(sums, n, rule) for n, rule in enumerate(rules))]


def _fold(x: Tensor, heads: int) -> Tensor:
    """The query heads of a group, summed; `x` itself where a result has one."""
    return x if heads == 1 else x.reshape(len(x) // heads, heads, *x.shape[1:]).sum(1)


def _bound(sums: Sums, n: int, rule: Rule) -> Tensor:
    """Of the n-th arithmetic."""
    nominal, total = around(sums, n, rule, sums.moved, sums.errors[n])
    total = _output_error(nominal.abs_(), total, rule)
    moved = _fold(rule.scale * sums.moved, rule.heads)
    return total.add_(moved.abs_()).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def around(sums: Sums, n: int, rule: Rule, moved: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The finished sums of weights that lie around exact ones moved so, and their errors before the
    output's cast; both new tensors.  error: the weights', times the operand."""
    nominal = torch.add(sums.exact, moved).mul_(rule.scale)
    if not rule.cast:
        return _fold(nominal, rule.heads), _sum_error(sums, n, rule, rule.heads, error)
    # Each head apart; then the casts, the sums of what they give, and the sum of all.
    total = _output_error(nominal.abs(), _sum_error(sums, n, rule, 1, error), rule)
    size, total = _fold(nominal.abs(), rule.heads), _fold(total, rule.heads)
    total = (
        total
        + relative(rule.heads - 1, U) * (size + total)
        + rule.heads * TINY * (size + total > 0)
    )
    return _fold(nominal, rule.heads), total


@dataclass(frozen=True, eq=False)
class Others:
    """What finished sums err by besides the errors of their weights, before the scale: of the
    product-sum, partial sums and final roundings, and flushed ones; (results, outputs, dim).

    beyond: where partial sums may overflow; tiny: what is lost behind the scale.  None: nowhere.
    """

    error: Tensor
    beyond: Tensor | None
    tiny: Tensor | None


def _sum_error(sums: Sums, n: int, rule: Rule, heads: int, known: Tensor) -> Tensor:
    """Error of the finished fp32 sums over that many query heads: weights (`known`, of each head),
    and `Others`.

    These are of the largest weights and of all that their casts may lose, also where it is known
    what they lose: the weights are no larger, and those below the normal range are counted so.
    """
    if (n, heads) not in sums.others:
        sums.others[n, heads] = _others(sums, n, rule, heads)
    others = sums.others[n, heads]
    total = torch.add(others.error, _fold(known, heads))
    if others.beyond is not None:
        total.masked_fill_(others.beyond, torch.inf)
    total.mul_(abs(rule.scale))
    return total if others.tiny is None else total.add_(others.tiny)


def _others(sums: Sums, n: int, rule: Rule, heads: int) -> Others:
    """The same for every known error of the weights.

    A kernel may scale its partial sums before it adds them, so the final roundings are proportional
    to the magnitudes too.
    """
    size, error, terms = (_fold(x, heads) for x in (sums.size, sums.errors[n], sums.terms))
    bare = _fold(sums.sums[0] + sums.sums[1 + n], heads)
    padded = heads * math.ceil(rule.length / rule.unit.products) * rule.unit.products
    additions = heads * rule.blocks - 1
    reach = torch.add(size, error)
    of_sizes, of_sums = rule.unit.splits(terms, padded)
    rounded = (1 + of_sizes + of_sums) * (1 + relative(additions + rule.roundings, U)) * (
        1 + rule.operand
    ) - 1
    of_sums = (1 + of_sums) * (1 + relative(additions, U)) - 1
    tiny, most = torch.zeros_like(bare), FP32_MAX / max(abs(rule.scale), 1.0)
    narrow = None if rule.unit.accumulator == "float32" else DTYPES[rule.unit.accumulator]
    if narrow:  # partial sums are added in it, too
        rounded = (1 + rounded) * (1 + relative(additions, narrow.unit_roundoff)) - 1
        of_sums = (1 + of_sums) * (1 + relative(additions, narrow.unit_roundoff)) - 1
        most = min(most, rule.unit.domain(padded))
    if rule.memory:
        # Each partial sum is rounded, and so is each addition.
        casts = additions + 1
        rounded = (1 + rounded) * (1 + relative(casts + 1, rule.memory.unit_roundoff)) - 1
        of_sums = (1 + of_sums) * (1 + relative(casts, rule.memory.unit_roundoff)) - 1
        growth = 1 + relative(casts, rule.memory.unit_roundoff)
        tiny += casts * growth * (rule.memory.smallest_subnormal / 2 + TINY)
        most = min(most, rule.memory.overflow / growth / abs(rule.scale)) if rule.scale else most
    if rule.coarse:
        tiny += rule.coarse * (1 + rounded) * bare
    if abs(rule.scale) * (additions + 1) < additions:
        # Partial sums that a small scale has multiplied may be flushed, and so may sums of them.
        tiny += 2 * TINY * (additions - abs(rule.scale) * (terms + additions + 1)).clamp(min=0.0)
    flushed = 2 * (terms + additions + 1) * TINY + max(rule.unit.flush, TINY) * bare
    if narrow:
        flushed = flushed + (1 + rounded) * rule.unit.underflow(padded)
    # Nothing is lost where every product is 0; nearly always none is.
    lossy: Tensor | float = 1.0 if above(reach, 0.0) else reach > 0
    total = torch.mul(reach, rounded)
    exact = torch.add(sums.exact, sums.moved)
    total.sub_(saved(of_sums, size, _fold(exact, heads).abs()))
    if rule.order != "any" and sums.partial is not None:
        order = InOrder(rule.unit, rule.operand, rule.roundings, rule.order == "whole_first")
        given = Magnitudes(exact, reach, error, terms)
        ordered = error_in_order(sums.partial, order, given, partial(_fold, heads=heads))
        torch.fmin(total, ordered, out=total)  # fp32 may overflow, to NaN
    total.add_(flushed * lossy)
    if rule.weighted.threshold:
        lost = Lost(error, _fold(sums.sums[1 + n], heads))
        total.add_((1 + rounded) * rule.weighted.loss(terms, bare, reach, lost))
    grown = reach.mul_(1 + rounded)
    beyond = None if below(grown, most) else grown >= most
    return Others(total, beyond, tiny * lossy if rule.scale and bool(tiny.any()) else None)


def _output_error(nominal: Tensor, total: Tensor, rule: Rule) -> Tensor:
    """The same behind a cast to the output's dtype; still 0 where every product is 0.  Both are
    overwritten."""
    size = nominal.add_(total)
    u = rule.output.unit_roundoff
    cast = total.add_(size, alpha=u)
    least = rule.output.smallest_subnormal / 2 + TINY
    cast.add_(least if above(size, 0.0) else (size != 0).double() * least)
    if not rule.cast or below(size, rule.output.overflow):
        return cast
    return cast.masked_fill_(size >= rule.output.overflow, torch.inf)
