"""Sanitizers: kernels under compute-sanitizer, with planted faults before them."""

from __future__ import annotations

from verify.document import Block, Heading, Inline, Paragraph, Section, Span
from verify.report.beside import Beside, introduced
from verify.report.schema import Report
from verify.sanitizers import page

ORDER = 90


def section(report: Report, beside: Beside) -> Section:
    """Its state, every finding, the kernels and the planted faults."""
    blocks: list[Block] = []
    if (account := beside.sanitizer) is not None:
        sources = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
        about: tuple[Inline, ...] = (
            f"compute-sanitizer {account['sanitizer']}, ",
            *page.run(account),
        )
        blocks += [Paragraph(about, note=True), *page.findings(account)]
        blocks += [page.kernels(account["tried"], sources), Heading("Planted faults")]
        blocks += [page.planted(account), Paragraph(page.PLANTED, note=True), *page.blind(account)]
        if bad := page.copies(account):
            blocks += [Heading("Known-bad copies of shipped kernels"), *bad]
            blocks += [Paragraph(page.COPIES, note=True)]
        blocks += page.further(account)
        blocks += [*page.exceptions(account), *page.not_run(account)]
    none = "Not run: no sanitizer.json lies beside this report. "
    does = " runs the kernels under compute-sanitizer, planted faults before them."
    whole = Section("Sanitizers", "sanitizers", tuple(blocks))
    return introduced(whole, report, "sanitizer", (none, Span("verify sanitize", "code"), does))
