"""Where results lie before their last rounding (docs/tolerance.md, *Known roundings*;
docs/tolerance-backward.md, *Lattice*)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Interval:
    """Where the elements of one result lie before they are rounded to the output's dtype, fp64:
    within `reach` of `middle`; +inf where nothing is asked."""

    middle: Tensor
    reach: Tensor

    def to(self, device: torch.device | str) -> Interval:
        """The same on another device."""
        return Interval(self.middle.to(device), self.reach.to(device))
