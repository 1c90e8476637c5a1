"""Speed: what `verify bench kernels` measured, if bench.json lies beside the report."""

from __future__ import annotations

from functools import partial

from verify.document import Block, Figure, Heading, Paragraph, Section
from verify.report.beside import Beside, introduced
from verify.report.schema import Report
from verify.report.speed_plot import speed_plot
from verify.timing import page
from verify.timing.record import Benchmark, fastest, trouble

ORDER = 95


def section(report: Report, beside: Beside) -> Section | None:
    """How it was measured, the fastest config of each variant, what failed, and the device; None if
    there is no bench.json."""
    if beside.bench is None and "bench" not in beside.unusable:
        return None
    blocks: list[Block] = [] if beside.bench is None else _blocks(report, beside.bench)
    return introduced(Section("Speed", "speed", tuple(blocks)), report, "bench", "")


def _blocks(report: Report, record: Benchmark) -> list[Block]:
    sources = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
    bad = [row for row in record["rows"] if trouble(row)]
    return [
        Paragraph(page.run(record), note=True),
        page.rows(fastest(record["rows"]) + bad, sources),
        Paragraph(page.CONVENTIONS, note=True),
        Figure(
            "speed", "TFLOP/s by workload; kernels of torch in grey", partial(speed_plot, record)
        ),
        Paragraph(f"All {len(record['rows'])} rows: bench.md.", note=True),
        Heading("Device"),
        page.peaks(record),
        *page.left(record),
    ]
