"""Bits: where the outputs of two runs that compute the same differ, in words."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verify.cell.arena import different
from verify.judging.findings import first, place

Outputs = Mapping[str, Tensor]


def difference(got: Outputs, wanted: Outputs, than: str) -> str:
    """The first output that differs, and where; "" if none does.

    than: which run `wanted` is of, in words.
    """
    for name, want in wanted.items():
        changed = different(want, got[name])
        if bool(changed.any()):
            at = first(changed)
            return (
                f"{name} is {float(got[name][at]):.9g} at {place(name, at)}, and"
                f" {float(want[at]):.9g} in {than}; {int(changed.sum())} of {changed.numel()}"
                " elements differ"
            )
    return ""
