"""A report as its two renderings, without files."""

from __future__ import annotations

from functools import lru_cache

from verify.document import html, markdown
from verify.evidence.strict_json import loads
from verify.report import Report, dumps, parse
from verify.report.beside import Beside
from verify.report.document import document


def as_markdown(report: Report, beside: Beside | None = None) -> str:
    """report.md."""
    return markdown.render(document(report, beside), "report.html and report.json")


def as_html(report: Report, beside: Beside | None = None) -> str:
    """report.html.  Equal reports are rendered once, since their plots take most of the time."""
    return _html(dumps(report)) if beside is None else html.render(document(report, beside))


@lru_cache(maxsize=32)
def _html(text: str) -> str:
    return html.render(document(parse(loads(text)), None))


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first Markdown table under a heading."""
    lines = page.split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
