"""Power: the smallest fault of each class that the campaign would have convicted."""

from __future__ import annotations

from verify.document import Number, Paragraph, Row, Section, Span, Table, count
from verify.report.beside import Beside
from verify.report.campaign_schema import PowerReport
from verify.report.power import FAULTS, summary
from verify.report.schema import Report

ORDER = 65
_COLUMNS = (
    "variant",
    "dtype",
    "fault",
    "smallest e",
    "assert_close",
    "Triton's tutorial",
    "cases",
    "the case that fails",
)
_NOTE = (
    "What this campaign would have noticed: a fault of that class and at least that strength, of"
    " either sign, leaves an element of the named case out of its bound. Nothing is promised below"
    " it, nor of other classes. Beside it, the strength that a comparison with torch's"
    " assert_close (default tolerances) or with 1e-2 (Triton's tutorial) would need, as the least"
    " over the same cases, with an otherwise exact kernel. docs/power.md derives the numbers."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per variant, dtype and class that has a certificate."""
    rows = tuple(map(_row, report.get("power", [])))
    if not rows:
        return None
    lead = Paragraph(summary(report) or "")
    return Section("Power", "power", (lead, Paragraph(_NOTE, note=True), Table(_COLUMNS, rows)))


def _row(one: PowerReport) -> Row:
    return (
        Span(one["variant"], "strong"),
        one["dtype"],
        FAULTS.get(one["fault"], one["fault"]),
        *map(Number, (one["strength"], one["close"], one["tutorial"])),
        count(one["cases"]),
        Span(one["case"], "code"),
    )
