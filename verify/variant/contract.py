"""What a kernel promises beyond numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verify.variant.validation import Declared


@dataclass(frozen=True, kw_only=True)
class Contract(Declared, path="contract"):
    """What the kernel promises beyond numbers.

    lse: "natural", "base2" or None if it returns none.  empty_row_out and empty_row_lse: what a row
    without a key holds. deterministic: bitwise the same again (any NaN is like any other), beside
    launches on other streams too. masked_values: "any" if a masked key or value may be NaN or
    infinite without effect, "finite" if these may spread from a masked place, "padding" if from
    there, but not from padding: a key in front of the first or behind the last one that some row of
    its sequence and head sees, and a row of Q (in a backward of dO, too) that sees no key. nan:
    "propagates" if a NaN that a row reads comes out of it, from Q and K as NaN in all of its O and
    in its LSE, from V as NaN in that column of its O; "out" if it does in O, whatever the LSE is;
    "any" if nothing is promised. batch_invariant: a sequence alone gives the same bits as in a
    batch. deterministic_backward, masked_values_backward: the same of the gradients.
    """

    lse: str | None = "natural"
    empty_row_out: float = 0.0
    empty_row_lse: float = -math.inf
    deterministic: bool = True
    masked_values: str = "finite"
    nan: str = "propagates"
    batch_invariant: bool = False
    deterministic_backward: bool = True
    masked_values_backward: str = "finite"
