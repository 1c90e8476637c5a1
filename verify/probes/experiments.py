"""Experiments on a sum of a kernel: values of its terms whose result tells where two of them meet.

In every column one term is huge, another the opposite, and some of the others are units: those
survive that are added behind the node where the two meet (`verify.probes.tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.probes.tree import Meeting, Pair


class UncountableError(ValueError):
    """A result is no multiple of a unit, so it does not tell which of them survived."""


@dataclass(frozen=True)
class Scale:
    """Values of terms.

    huge: absorbs `at_once` units, in fp32 and in a matrix unit of 25 fraction bits.  unit: up to
    `at_once` of them are counted exactly in the dtype of the result.
    """

    huge: float
    unit: float
    at_once: int


def scale_of(dtype: str) -> Scale:
    """The scale for sums whose terms and results are of that dtype."""
    if dtype == "float16":
        return Scale(2.0**15, dtype_named(dtype).smallest_subnormal, 256)
    return Scale(2.0**60, 1.0, 1 << min(dtype_named(dtype).precision - 2, 10))


def columns_of(pairs: Sequence[Pair], terms: int, scale: Scale) -> tuple[Tensor, int]:
    """The terms of every experiment, (terms, pairs x parts) in fp64, and how many parts each pair
    has: units that one result could not count are spread over several columns."""
    parts = [range(at, min(at + scale.at_once, terms)) for at in range(0, terms, scale.at_once)]
    columns = torch.zeros(terms, len(pairs) * len(parts), dtype=torch.float64)
    for place, ((i, j), part) in enumerate((pair, part) for pair in pairs for part in parts):
        columns[part.start : part.stop, place] = scale.unit
        columns[i, place], columns[j, place] = scale.huge, -scale.huge
    return columns, len(parts)


def meeting_of(terms: int, scale: Scale, survivors: Callable[[Tensor], Tensor]) -> Meeting:
    """Where pairs of terms meet.

    survivors: the number of units that each column's result has, fp64, from the columns.
    """

    def meeting(pairs: Sequence[Pair]) -> list[int]:
        columns, parts = columns_of(pairs, terms, scale)
        units = survivors(columns).view(len(pairs), parts)
        counts = units.round()
        left = counts.sum(1)
        if not bool(
            ((units - counts).abs() < 0.25).all() and (left >= 0).all() and (left < terms - 1).all()
        ):
            raise UncountableError(
                "a result is no multiple of one term, or more than all: units were rounded, or"
                " terms do not weigh the same"
            )
        return [terms - int(count) for count in left]

    return meeting
