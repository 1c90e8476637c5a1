"""Where gradients lie before their last rounding (docs/tolerance-backward.md, *Lattice*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.tolerance.arithmetic import TINY
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_sums import Rule, Sums, around
from verify.tolerance.intervals import Interval


@dataclass(frozen=True, eq=False)
class Spans:
    """The intervals of dq, dk and dv while they are made, by name, of heads folded; none for an
    unknown backward, whose results may have been rounded before they are rounded."""

    parts: dict[str, Interval]

    @staticmethod
    def like(gradients: Sequence[Tensor], a: GradientArithmetic) -> Spans:
        """For gradients of those shapes, (batch, heads, positions, dim)."""
        named = zip(("dq", "dk", "dv"), gradients, strict=True)
        return Spans(
            {name: Interval(x.new_zeros(x.shape), x.new_zeros(x.shape)) for name, x in named}
            if a.narrow is None
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
            part.reach.masked_fill_(bound.isinf(), torch.inf)
        return self.parts or None


def interval(sums: Sums, rule: Rule) -> Interval:
    """Where the first arithmetic's gradient lies before its last rounding: the middle, and how far
    from it, +inf where nothing is asked.  By the known roundings, if the sums have any."""
    moved, error = sums.known or (sums.moved, sums.errors[0])
    middle, total = around(sums, 0, rule, moved, error)
    reach = total + TINY * (middle.abs() + total > 0)  # a small result is flushed
    unasked = ~(middle.isfinite() & reach.isfinite())
    return Interval(middle.masked_fill(unasked, 0.0), reach.masked_fill(unasked, torch.inf))
