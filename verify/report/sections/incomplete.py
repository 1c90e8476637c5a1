"""Incomplete evidence: cases with two outcomes or none, and lines cut short."""

from __future__ import annotations

from verify.document import Line, List, Section, Span, listed
from verify.report.beside import Beside
from verify.report.schema import Report

ORDER = 150


def section(report: Report, beside: Beside) -> Section | None:
    """One entry each."""
    items: list[Line] = [
        (Span("both passed and failed", "bad"), f" {one['oracle']}: ", Span(one["case"], "code"))
        for one in report["unstable"]
    ]
    items += [
        (f"launched and never judged ({one['phase']}): ", Span(one["case"], "code"))
        for one in report["lost"]
    ]
    items += [
        (f"interrupted ({one['phase']}), since the run was ended: ", Span(one["case"], "code"))
        for one in report.get("interrupted", [])
    ]
    items += [
        ("ended before it had asked everything: run ", Span(one["run"], "code"))
        for one in report.get("runs", [])
        if one.get("ended_early")
    ]
    items += [("line cut short by a kill: ", Span(place, "code")) for place in report["torn"]]
    if not items:
        return None
    return Section("Incomplete evidence", "incomplete", (List(listed(items, Span)),))
