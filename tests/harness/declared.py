"""Declarations by the names of their fields alone, whichever part has them: tests vary many."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from verify.variant import GradientNumerics, Numerics
from verify.variant.numerics import leaves

_Kind = TypeVar("_Kind")


def flat_numerics(**values: object) -> Numerics:
    """As `with_fields(Numerics(), ...)`."""
    return with_fields(Numerics(), **values)


def flat_gradients(**values: object) -> GradientNumerics:
    """As `with_fields(GradientNumerics(), ...)`."""
    return with_fields(GradientNumerics(), **values)


def with_fields(declared: _Kind, **values: object) -> _Kind:
    """The declaration with other values of those fields, each named by the end of its path:
    "lanes", or "row_sum_lanes", is softmax.row_sum.lanes.  Raises TypeError for no such field."""
    paths = [path.split(".") for path in leaves(declared)]
    for name, value in values.items():
        named = [p for p in paths if name in ("_".join(p[at:]) for at in range(len(p)))]
        if len(named) != 1:
            raise TypeError(f"{name}: {len(named)} fields have that name")
        declared = _with(declared, named[0], value)
    return declared


def _with(declared: _Kind, path: list[str], value: object) -> _Kind:
    name, *rest = path
    if rest:
        value = _with(getattr(declared, name), rest, value)
    return replace(declared, **{name: value})  # type: ignore[type-var]
