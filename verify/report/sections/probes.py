"""Probes of the device: what was measured, beside what the tables say that the bounds rely on."""

from __future__ import annotations

from verify.document import Block, Paragraph, Section, Span
from verify.report import words
from verify.report.beside import Beside, ran, told
from verify.report.schema import Report

ORDER = 80


def section(report: Report, beside: Beside) -> Section:
    """Its state, every disagreement, and the tables of what was tried."""
    entry, probes = told(report, "probes"), beside.probes
    blocks: list[Block] = []
    if entry is not None:
        blocks.append(Paragraph(Span(entry["said"], "bad" if entry["status"] == "red" else "soft")))
    elif probes is None:
        none = "Not run: no probes.json lies beside this report. "
        does = " measures what the bounds rely on and lays it beside the tables."
        blocks.append(Paragraph((none, Span("verify probe", "code"), does)))
    if probes is not None:
        from verify.probes import page  # needs what probes need, which no other report does

        if not ran(probes):
            blocks.append(Paragraph("Not run: no matrix instruction and no function was tried."))
        blocks += [*page.boxes(probes), *page.tables(probes), *page.not_run(probes)]
        blocks.append(Paragraph("All experiments and results at the edges: probes.md.", note=True))
    mark = None if entry is None else words.mark(entry["status"], 1)
    return Section("Probes of the device", "probes", tuple(blocks), mark)
