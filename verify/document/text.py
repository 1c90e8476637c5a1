"""Small texts that every rendering shares: numbers, durations, and plain text of whatever kernels
say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime

NONE = "–"
# C0 and C1, bidirectional marks and overrides, line separators, and surrogates, which UTF-8 cannot
# hold.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: object) -> str:
    """Text without control characters (terminal escapes) or marks that reorder it (bidirectional
    overrides)."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))


def number(value: float | str | None) -> str:
    """Three significant digits, or all before the point of thousands; "–" for nothing."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return plain(value)
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def exact(value: float | str | None) -> str:
    """Nine significant digits, which tell any two fp32 numbers apart."""
    return number(value) if value is None or isinstance(value, str) else f"{value:.9g}"


def ratio(value: float | None) -> str:
    """r, with more digits where three would make 1 of something else: 1.0004 fails, 0.9996 does
    not."""
    short = number(value)
    return f"{value:.6f}" if value is not None and short == "1" and value != 1 else short


def seconds(value: float | None) -> str:
    """A duration in a unit that suits it."""
    if value is None:
        return NONE
    for least, unit, scale in ((60.0, "min", 1 / 60), (1.0, "s", 1.0), (1e-3, "ms", 1e3)):
        if value >= least:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def moment(started: str) -> str:
    """When a run began, to the minute in UTC; nothing for what is no time."""
    for form in ("%Y%m%dT%H%M%SZ", "%Y-%m-%dT%H:%M:%S%z"):
        try:
            return datetime.strptime(started, form).strftime("%Y-%m-%d %H:%M UTC")
        except ValueError:
            continue
    return ""


def count(value: int | None) -> str:
    """An integer with its thousands apart."""
    return NONE if value is None else f"{value:,}"


def share(part: int, whole: int) -> str:
    """ "12 / 340 (3.5 %)"."""
    return f"{part} / {whole} ({100 * part / whole:.1f} %)" if whole else NONE


def one_line(text: object) -> str:
    """Plain text with every run of blanks and line ends as one blank."""
    return " ".join(plain(text).split())


def shorter(text: str, limit: int) -> str:
    """At most `limit` characters, the middle left out."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} … {text[-(limit // 3 - 3) :]}"


def value(item: object) -> str:
    """A declared value (`numerics`, `contract`) as text."""
    if isinstance(item, float):
        return number(item)
    if isinstance(item, list | tuple):
        return ", ".join(value(part) for part in item) or "none"
    return (
        {None: "none", True: "yes", False: "no"}.get(item, plain(item))
        if item is None or isinstance(item, bool)
        else plain(item)
    )


def intervals(numbers: list[int]) -> str:
    """[8, 16, 24, 64] -> "8-24 by 8, 64"; [1, 2, 3] -> "1-3"."""
    found: list[tuple[int, int, int]] = []  # first, last, step
    for item in numbers:
        if (
            found
            and (found[-1][2] == 0 or item - found[-1][1] == found[-1][2])
            and item > found[-1][1]
        ):
            first, last, _ = found[-1]
            found[-1] = (first, item, item - last)
        else:
            found.append((item, item, 0))
    return ", ".join(_interval(*run) for run in found)


def _interval(first: int, last: int, step: int) -> str:
    if step == 0:
        return str(first)
    if last == first + step and step > 1:
        return f"{first}, {last}"
    return f"{first}-{last}" + (f" by {step}" if step > 1 else "")


def grouped(left: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(reason, names) of (name, reason): one entry per reason."""
    found: dict[str, list[str]] = {}
    for name, reason in left:
        found.setdefault(reason, []).append(name)
    return list(found.items())
