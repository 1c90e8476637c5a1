"""The report as a document: the headline, then every section that has something to say."""

from __future__ import annotations

from collections.abc import Iterator

from verify.document import Block, Document, Inline, Link, Paragraph, Section, Span, text
from verify.report import words
from verify.report.beside import Beside
from verify.report.headline import headline
from verify.report.schema import Report
from verify.report.sections import sections

_BESIDE = {
    "probes": ("Probes", "#probes"),
    "sanitizer": ("Sanitizers", "#sanitizers"),
    "bench": ("Speed", "#speed"),
    "profiles": ("Profiles", "#profiles"),
}


def document(report: Report, beside: Beside | None = None) -> Document:
    """The whole report.

    beside: what lies beside the report, whose entries `verify.report.beside.joined` has put into
    it.
    """
    name = str(report["device"].get("name", "unknown device"))
    found: tuple[Section, ...] = sections(report, beside or Beside())
    return Document(f"Attention accuracy: {name}", tuple(_lead(report)), found)


def _lead(report: Report) -> Iterator[Block]:
    """What is new first, and everything that a reader must see before any verdict."""
    yield Paragraph((words.mark(report["status"], report["cases"]), " ", headline(report)))
    yield from (Paragraph(Span(reason, "strong")) for reason in report["reasons"])
    for entry in report.get("beside", []):
        look = Span(entry["said"], "bad" if entry["status"] == "red" else "soft")
        yield Paragraph(
            (words.mark(entry["status"], 1), " ", Link(*_BESIDE[entry["name"]]), ": ", look)
        )
    moment = text.moment(report["started"])
    begun: Inline = f", started {moment}, profile " if moment else ", profile "
    run, profile = Span(report["run"], "code"), Span(report["profile"], "code")
    yield Paragraph(("Run ", run, begun, profile, "."), note=True)
    cells = report["versions"].get("cells", "")
    if "not confined" in cells:
        yield Paragraph((Span(f"Cells: {cells}", "strong"), " (docs/security.md)"))
