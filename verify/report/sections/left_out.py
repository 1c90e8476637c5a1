"""Older sources: evidence that does not count, since a later run knew another source."""

from __future__ import annotations

from verify.document import Number, Paragraph, Row, Section, Span, Table
from verify.report.beside import Beside
from verify.report.schema import Report

ORDER = 145


def section(report: Report, beside: Beside) -> Section | None:
    """One row for each variant and run that was left out."""
    rows: list[Row] = [
        (
            Span(one["variant"], "strong"),
            Span(one["run"], "code"),
            Number(one["cases"]),
            Number(one["failures"]),
        )
        for one in report.get("left_out", [])
    ]
    if not rows:
        return None
    said = (
        "The source of these variants has changed between the runs. Only the newest one is judged."
    )
    table = Table(("variant", "run that was left out", "cases", "failing"), tuple(rows))
    return Section("Older sources", "older-sources", (Paragraph(said, note=True), table))
