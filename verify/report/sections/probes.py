"""Probes of the device: what was measured, beside what the tables say that the bounds rely on."""

from __future__ import annotations

from verify.document import Block, Paragraph, Section, Span
from verify.probes import page
from verify.report.beside import Beside, introduced, ran
from verify.report.schema import Report

ORDER = 80


def section(report: Report, beside: Beside) -> Section:
    """Its state, every disagreement, and the tables of what was tried."""
    blocks: list[Block] = []
    if (probes := beside.probes) is not None:
        if not ran(probes):
            blocks.append(Paragraph("Not run: no instruction and no function was tried."))
        blocks += [*page.boxes(probes), *page.tables(probes), *page.not_run(probes)]
        blocks.append(Paragraph("All experiments and results at the edges: probes.md.", note=True))
    none = "Not run: no probes.json lies beside this report. "
    does = " measures what the bounds rely on and lays it beside the tables."
    whole = Section("Probes of the device", "probes", tuple(blocks))
    return introduced(whole, report, "probes", (none, Span("verify probe", "code"), does))
