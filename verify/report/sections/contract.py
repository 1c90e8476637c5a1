"""Measured contracts: every measured property of every variant, side by side, against what it
declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from verify.document import Line, Look, Paragraph, Section, Span, Table, text
from verify.report.beside import Beside
from verify.report.schema import Cell, Report
from verify.report.tables import ordered

ORDER = 120
_ABOUT = (
    "What raw outputs show on problems designed for it, whatever is declared. Where the"
    " declaration says something else, it stands in brackets. A contradiction is a failing"
    " verdict. Dtypes stand behind words that do not hold for all of a variant's; several words"
    " without dtypes were found on several problems. causal.tl, window.tl: masks aligned to the"
    " top left. –: not measured."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per property, one column per variant of which anything was measured."""
    measured = {v["ref"]: v.get("measured", {}) for v in ordered(report)}
    if not columns(measured):
        return None
    found = tuple((Span(name, "strong"), *map(_line, said)) for name, said in rows(measured))
    blocks = (Paragraph(_ABOUT, note=True), Table(("property", *columns(measured)), found))
    return Section("Measured contracts", "contracts", blocks)


def _line(words: Words) -> Line:
    look: Look = "bad" if words.contradicts else "plain"
    if not words.declared:
        return Span(words.measured, look)
    return (Span(words.measured, look), " ", Span(f"[declared: {words.declared}]", "soft"))


def columns(measured: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """The variants of which anything was measured, in their order."""
    return [ref for ref, found in measured.items() if found]


class Words(NamedTuple):
    """What a cell shows.  declared: where its words are not those that were measured."""

    measured: str
    declared: str
    contradicts: bool


def rows(measured: Mapping[str, Mapping[str, Cell]]) -> list[tuple[str, list[Words]]]:
    """(property, words per variant of `columns`), by property."""
    names = sorted(
        {name for found in measured.values() for name in found},
        key=lambda name: (name.lower(), name),
    )
    refs = columns(measured)
    return [(name, [_cell(measured[ref].get(name)) for ref in refs]) for name in names]


def _cell(cell: Cell | None) -> Words:
    if cell is None:
        return Words(text.NONE, "", False)
    said, declared = _words(cell["measured"]), _words(cell["declared"])
    return Words(said, declared if declared != said else "", bool(cell["contradicts"]))


def _words(found: Mapping[str, list[str]]) -> str:
    everywhere = {dtype for dtypes in found.values() for dtype in dtypes}
    return "; ".join(
        (
            word
            if set(dtypes) == everywhere or word == ", ".join(dtypes)
            else f"{word} ({', '.join(dtypes)})"
        )
        for word, dtypes in found.items()
    )
