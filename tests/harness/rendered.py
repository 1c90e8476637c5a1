"""A report as its two renderings, without files."""

from __future__ import annotations

from verify.document import html, markdown
from verify.report import Report
from verify.report.beside import Beside
from verify.report.document import document


def as_markdown(report: Report, beside: Beside | None = None) -> str:
    """report.md."""
    return markdown.render(document(report, beside), "report.html and report.json")


def as_html(report: Report, beside: Beside | None = None) -> str:
    """report.html."""
    return html.render(document(report, beside))
