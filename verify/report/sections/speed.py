"""Speed: what `verify bench kernels` measured, if bench.json lies beside the report."""

from __future__ import annotations

from functools import partial

from verify.document import Block, Figure, Heading, Paragraph, Section
from verify.report.beside import Beside, introduced
from verify.report.schema import Report
from verify.report.speed_plot import speed_plot
from verify.timing import page
from verify.timing.record import Benchmark, trouble

ORDER = 95


def section(report: Report, beside: Beside) -> Section | None:
    """How it was measured, TFLOP/s by length, what failed, and the device; None if there is no
    bench.json."""
    if beside.bench is None and "bench" not in beside.unusable:
        return None
    blocks: list[Block] = [] if beside.bench is None else _blocks(report, beside.bench)
    return introduced(Section("Speed", "speed", tuple(blocks)), report, "bench", "")


def _blocks(report: Report, record: Benchmark) -> list[Block]:
    sources = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
    many = len(record["rows"])
    bad = [row for row in record["rows"] if trouble(row)]
    return [
        Paragraph(page.run(record), note=True),
        *page.by_length(record, sources),
        *([page.rows(bad, sources)] if bad else []),
        Paragraph(page.CONVENTIONS, note=True),
        Figure(
            "speed", "TFLOP/s by workload; kernels of torch in grey", partial(speed_plot, record)
        ),
        Paragraph(f"Configs, times and first values of all {many} rows: bench.md.", note=True),
        Heading("Device"),
        page.peaks(record),
        *page.left(record),
    ]
