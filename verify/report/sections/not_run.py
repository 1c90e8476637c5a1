"""Not run: variants and dtypes that were not tried, and why."""

from __future__ import annotations

from verify.document import Row, Section, Span, Table, listed
from verify.report.beside import Beside
from verify.report.schema import Report

ORDER = 140


def section(report: Report, beside: Beside) -> Section | None:
    """One row each."""
    rows: list[Row] = [
        (Span(one["variant"], "strong"), one["dtype"], one["reason"]) for one in report["not_run"]
    ]
    if not rows:
        return None
    table = Table(("variant", "dtype", "reason"), listed(rows, lambda said: (said,)))
    return Section("Not run", "not-run", (table,))
