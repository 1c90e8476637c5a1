"""The result of an oracle for a trial, and names for the place of a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verify.evidence import Finding


@dataclass(frozen=True)
class Ruling:
    """The result of an oracle for a trial: a finding, or None if the property holds, and what the
    oracle measured or observed.

    inapplicable: why the oracle cannot judge the trial, "" if its values cannot show anything; None
    if the oracle has judged it.
    """

    finding: Finding | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, str] = field(default_factory=dict)
    inapplicable: str | None = None


def worst(values: Tensor) -> tuple[int, ...]:
    """The index of the largest value; NaN counts as infinite."""
    return coordinate(int(values.nan_to_num(nan=torch.inf).argmax()), values.shape)


def coordinate(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of a flat index.  (torch.unravel_index imports sympy at its first call, which
    takes seconds.)"""
    reversed_axes = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        reversed_axes.append(at)
    return tuple(reversed(reversed_axes))


def convict(
    oracle: str, message: str, *, name: str, bad: Tensor, got: float | str, bound: float | str
) -> Ruling:
    """A ruling against `name` ("out", "lse") at the true elements of `bad`, a boolean tensor."""
    where, count = first_place(name, bad), int(bad.sum())
    return Ruling(
        Finding(
            oracle=oracle,
            message=message,
            got=got,
            bound=bound,
            where=where,
            count=count,
            total=bad.numel(),
        )
    )


def place(name: str, index: tuple[int, ...]) -> str:
    """A coordinate in words: out[b=0, h=1, q=5, d=3], dk[b=0, h=1, k=7, d=3]."""
    axes = "bhkd" if name in ("dk", "dv") else "bhqd"
    return f"{name}[{', '.join(f'{axis}={i}' for axis, i in zip(axes, index, strict=False))}]"


def first(where: Tensor) -> tuple[int, ...]:
    """The first true coordinate of a boolean tensor."""
    return tuple(int(i) for i in where.nonzero()[0])


def first_place(name: str, where: Tensor) -> str:
    """The first true coordinate of a boolean tensor, in words."""
    return place(name, first(where))
