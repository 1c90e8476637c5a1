"""Brief: values and counts cut short, for messages and records.  Imports nothing, so that cells
and commands can have it alike."""

from __future__ import annotations


def shown(value: object) -> str:
    """A value for a message, on one line and no longer than that takes."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(number: int, noun: str) -> str:
    """How many of what: 1 case, 2,000 cases."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def short(value: float, digits: int) -> float:
    """The value to so many significant digits."""
    return float(f"{value:.{digits}g}")
