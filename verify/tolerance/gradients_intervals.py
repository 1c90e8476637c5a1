"""Where gradients lie before their last rounding (docs/tolerance-backward.md, *Lattice*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.tolerance.arithmetic import TINY
from verify.tolerance.extremes import above, below
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_sums import Rule, Sums, around
from verify.tolerance.intervals import Interval


@dataclass(frozen=True, eq=False)
class Spans:
    """The intervals of dq, dk and dv while they are made, by name, of heads folded; none where they
    are not asked, and for an unknown backward, whose results may have been rounded before they are
    rounded."""

    parts: dict[str, Interval]

    @staticmethod
    def like(gradients: Sequence[Tensor], a: GradientArithmetic) -> Spans:
        """For gradients of those shapes, (batch, heads, positions, dim)."""
        named = zip(("dq", "dk", "dv"), gradients, strict=True)
        return Spans(
            {name: Interval(x.new_zeros(x.shape), x.new_zeros(x.shape)) for name, x in named}
            if a.intervals and a.narrow is None
            else {}
        )

    def put(self, name: str, index: slice | tuple[slice, ...], sums: Sums, rule: Rule) -> None:
        """Of the finished sums, at that index of heads and positions."""
        if name in self.parts:
            made, whole = interval(sums, rule), self.parts[name]
            whole.middle.flatten(0, 1)[index] = made.middle
            whole.reach.flatten(0, 1)[index] = made.reach

    def found(self, bounds: Sequence[Tensor]) -> dict[str, Interval] | None:
        """All of them; nothing is asked where a bound is infinite.  None without any."""
        for part, bound in zip(self.parts.values(), bounds, strict=bool(self.parts)):
            if not below(bound, torch.inf):
                part.reach.masked_fill_(bound.isinf(), torch.inf)
        return self.parts or None


def interval(sums: Sums, rule: Rule) -> Interval:
    """Where the first arithmetic's gradient lies before its last rounding: the middle, and how far
    from it, +inf where nothing is asked.  By the known roundings, if the sums have any."""
    moved, error = sums.known or (sums.moved, sums.errors[0])
    middle, reach = around(sums, 0, rule, moved, error)
    size = middle.abs().add_(reach)
    # A small result is flushed, unless every product is 0.
    reach.add_(TINY if above(size, 0.0) else TINY * (size > 0))
    if below(size, torch.inf):
        return Interval(middle, reach)
    unasked = ~(middle.isfinite() & reach.isfinite())
    return Interval(middle.masked_fill_(unasked, 0.0), reach.masked_fill_(unasked, torch.inf))
