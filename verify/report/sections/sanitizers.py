"""Sanitizers: kernels under compute-sanitizer, with planted faults before them."""

from __future__ import annotations

from verify.document import Block, Heading, Inline, Paragraph, Section, Span
from verify.report import words
from verify.report.beside import Beside, told
from verify.report.schema import Report
from verify.sanitizers import page

ORDER = 90


def section(report: Report, beside: Beside) -> Section:
    """Its state, every finding, the kernels and the planted faults."""
    entry, account = told(report, "sanitizer"), beside.sanitizer
    blocks: list[Block] = []
    if entry is not None:
        blocks.append(Paragraph(Span(entry["said"], "bad" if entry["status"] == "red" else "soft")))
    else:
        none = "Not run: no sanitizer.json lies beside this report. "
        does = " runs the kernels under compute-sanitizer, planted faults before them."
        blocks.append(Paragraph((none, Span("verify sanitize", "code"), does)))
    if account is not None:
        sources = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
        about: tuple[Inline, ...] = (
            f"compute-sanitizer {account['sanitizer']}, ",
            *page.run(account),
        )
        blocks += [Paragraph(about, note=True), *page.findings(account)]
        blocks += [page.kernels(account["tried"], sources), Heading("Planted faults")]
        blocks += [page.planted(account), Paragraph(page.PLANTED, note=True)]
        blocks += [*page.exceptions(account), *page.not_run(account)]
    mark = None if entry is None else words.mark(entry["status"], 1)
    return Section("Sanitizers", "sanitizers", tuple(blocks), mark)
