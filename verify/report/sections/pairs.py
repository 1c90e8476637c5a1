"""Pairs: which properties of problems never met in a case."""

from __future__ import annotations

from verify.document import Block, Folded, List, Paragraph, Section, listed, text
from verify.report.beside import Beside
from verify.report.schema import Report

ORDER = 66
_NOTE = (
    "Every problem has factors: its mask, its heads, where its rows and keys end in their tiles"
    " (a tile and 1: one more than a whole tile), and others. Each factor has a few levels:"
    " verify/problem/factors.py. A fault that needs two levels is seen only in a case that has"
    " both. Some levels exclude each other, or no variant supports both."
)


def section(report: Report, beside: Beside) -> Section | None:
    """How many pairs of levels met, and the others by name."""
    found = report.get("pairs")
    if found is None or not found["met"]:
        return None
    met, never = text.count(found["met"]), text.count(len(found["never"]))
    said = f"{met} pairs of levels of two factors met in a case, {never} never did."
    blocks: tuple[Block, ...] = (Paragraph(said), Paragraph(_NOTE, note=True))
    if found["never"]:
        names = List(listed(found["never"], str))
        blocks = (*blocks, Folded("Pairs that never met", (names,)))
    return Section("Pairs", "pairs", blocks)
