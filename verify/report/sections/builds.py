"""Builds: what the compiler says of each variant on each architecture; nothing was run."""

from __future__ import annotations

from collections.abc import Iterator

from verify import document as doc
from verify.document import text
from verify.report.beside import Beside
from verify.report.schema import BuildsReport, Report
from verify.report.sections.failing import MESSAGE
from verify.report.tables import ordered

ORDER = 100
COLUMNS = (
    *("variant", "arch", "builds", "failing", "registers", "shared, B", "stack, B"),
    *("spilling", "worst spill: stores + loads, B", "in build"),
)
_NOTE = (
    "Compiled without running; the largest over the builds. Registers, stack and spills per thread,"
    " shared memory per block, memory in bytes. Where few of many builds were compiled, the rest"
    " was left out."
)


def section(report: Report, beside: Beside) -> doc.Section:
    """One row per variant and architecture, then what does not compile."""
    return doc.Section("Builds", "builds", tuple(_blocks(report)))


def _blocks(report: Report) -> Iterator[doc.Block]:
    rows = tuple(_row(v["ref"], b) for v in ordered(report) for b in v["builds"])
    if rows:
        yield doc.Table(COLUMNS, rows)
        yield doc.Paragraph(_NOTE, note=True)
    broken: list[doc.Block] = [
        doc.Boxed("red", tuple(_broken(*one))) for one in broken_builds(report)
    ]
    yield from doc.listed(broken, doc.Paragraph)
    if missing := not_built(report):
        yield doc.Paragraph(missing, note=True)


def _row(ref: str, b: BuildsReport) -> doc.Row:
    some = "" if b["compiled"] == b["builds"] else f"{b['compiled']} of {b['builds']}"
    spilt = b["spill_stores"] + b["spill_loads"] if b["spilling"] else None
    worst = f"{text.count(b['spill_stores'])} + {text.count(b['spill_loads'])}"
    return (
        *(doc.Span(ref, "strong"), b["arch"], doc.Number(b["compiled"], some)),
        doc.Number(len(b["failing"]), look="bad" if b["failing"] else "plain"),
        *map(doc.count, (b["registers"], b["shared"], b["stack"], b["spilling"])),
        doc.Number(spilt, text.NONE if spilt is None else worst),
        doc.Span(b["spill_build"], "code") if b["spill_build"] else text.NONE,
    )


def _broken(ref: str, b: BuildsReport) -> Iterator[doc.Block]:
    names = doc.Span(text.shorter(", ".join(b["failing"]), 200), "code")
    arch = doc.Span(b["arch"], "code")
    yield doc.Paragraph((doc.Span(ref, "strong"), " · ", arch, " · does not compile: ", names))
    yield doc.Code(text.shorter(b["error"], MESSAGE))


def broken_builds(report: Report) -> list[tuple[str, BuildsReport]]:
    """(variant, builds) for every variant and architecture where some build does not compile."""
    return [(v["ref"], b) for v in ordered(report) for b in v["builds"] if b["failing"]]


def not_built(report: Report) -> str:
    """In words, of which variants no build is on record, and why where that is known; empty if
    there are none."""
    if not any(variant["builds"] for variant in report["variants"]):
        return (
            "Nothing was compiled in this run: registers, shared memory and spills are not known."
        )
    names = [
        variant["ref"] + (f" ({variant['unavailable']})" if variant["unavailable"] else "")
        for variant in ordered(report)
        if not variant["builds"]
    ]
    return f"No build is on record of {', '.join(names)}." if names else ""
