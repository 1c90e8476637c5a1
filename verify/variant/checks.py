"""Checks of one value, which the rules of declarations are made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from verify.brief import shown

# A check returns what the field holds from now on (a list becomes a tuple), or raises ValueError
# with the words behind the field's name.
Check = Callable[[object], object]


def instance_of(kind: type) -> Check:
    """An instance of that class."""

    def checked(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"{shown(value)} is no {kind.__name__}")
        return value

    return checked


def one_of(*words: str | None) -> Check:
    """One of those words."""

    def checked(value: object) -> object:
        if not (value is None or isinstance(value, str)) or value not in words:
            raise ValueError(f"{shown(value)} is none of {', '.join(map(str, words))}")
        return value

    return checked


def some_of(*words: str, least: int = 0) -> Check:
    """A tuple or list of those words, each once, and so many at least."""

    def checked(value: object) -> object:
        several = sequence(value, f"names out of {', '.join(words)}")
        for one in several:
            if not isinstance(one, str) or one not in words:
                raise ValueError(f"{shown(one)} is none of {', '.join(words)}")
        if len(set(several)) < len(several):
            raise ValueError(f"{shown(value)} names one twice")
        if len(several) < least:
            raise ValueError(f"is empty; it takes {least} at least of {', '.join(words)}")
        return several

    return checked


def matching(expression: str, what: str) -> Check:
    """A text of that form."""

    def checked(value: object) -> object:
        if not isinstance(value, str) or not re.fullmatch(expression, value, re.ASCII):
            raise ValueError(f"{shown(value)} is no {what}")
        return value

    return checked


def flag(value: object) -> object:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is neither True nor False")
    return value


def whole(least: int, most: int, *, optional: bool = False) -> Check:
    """A whole number from `least` to `most`, or None if that is an option."""

    def checked(value: object) -> object:
        if value is None and optional:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            either = " or None" if optional else ""
            raise ValueError(f"{shown(value)} is no whole number from {least} to {most}{either}")
        return value

    return checked


def wholes(least: int, most: int) -> Check:
    """A tuple, list or range of whole numbers, one at least; a range stays a range."""
    one = whole(least, most)

    def checked(value: object) -> object:
        several = (
            value
            if isinstance(value, range)
            else sequence(value, f"whole numbers from {least} to {most}")
        )
        if not len(several):
            raise ValueError(f"is empty; it takes whole numbers from {least} to {most}")
        for number in (several[0], several[-1]) if isinstance(several, range) else several:
            one(number)
        return several

    return checked


def number(least: float, most: float) -> Check:
    """A finite number from `least` to `most`."""

    def checked(value: object) -> object:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= most
        ):
            raise ValueError(f"{shown(value)} is no number from {least:g} to {most:g}")
        return value

    return checked


def any_number(value: object) -> object:
    """A number of fp32, infinities and NaN included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is no number (0.0, math.inf, math.nan...)")
    return value


def power_of_two(least: float, most: float) -> Check:
    """A power of two from `least` to `most`."""
    within = number(least, most)

    def checked(value: object) -> object:
        within(value)
        if math.frexp(float(value))[0] != 0.5:  # type: ignore[arg-type]
            raise ValueError(f"{shown(value)} is no power of two")
        return value

    return checked


def sequence(value: object, what: str) -> tuple[Any, ...]:
    """As a tuple; a bare string is none, though Python would take it for its letters."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{shown(value)} is no tuple of {what}")
    return tuple(value)
