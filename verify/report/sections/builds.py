"""Builds: what the compiler says of each variant on each architecture; nothing was run."""

from __future__ import annotations

from collections.abc import Iterator

from verify import document as doc
from verify.document import text
from verify.evidence.strict_json import Number
from verify.report.beside import Beside
from verify.report.resources import KINDS
from verify.report.schema import BuildsReport, InstructionsReport, Report
from verify.report.sections.failing import MESSAGE
from verify.report.tables import ordered

ORDER = 100
COLUMNS = (
    *("variant", "arch", "builds", "failing", "registers", "shared, B", "stack, B"),
    *("spilling", "worst spill: stores + loads, B", "its budget, B", "in build"),
)
INSTRUCTION_COLUMNS = (
    *("variant", "config", "builds", "MMA", "other : MMA, loop", "other : MMA, kernel"),
    *("FP32 + INT : MMA, loop", "FP32 + INT : MMA, kernel"),
)
_PREFERRED = "sm_90a"  # of the architectures, if none is the device's
_INSTRUCTION_NOTE = (
    "SASS instructions for each MMA instruction, from the smallest to the largest of the builds of"
    " a config with the same kinds of MMA, on {arch}; of the loop with most MMA instructions, and"
    " of the whole kernel. One HGMMA, QGMMA or UTCMMA does the work of many HMMA: compare only rows"
    " of one kind."
)
_KINDS_NOTE = (
    "SASS instructions of these kinds in a build, from the smallest to the largest number. LDL and"
    " STL are accesses to local memory: a build without a budget for spills has none. A build that"
    " lacks a kind that it declares (`Build.expects`) is among the failing ones."
)
_NOTE = (
    "Compiled without running; the largest over the builds. Registers, stack and spills per thread,"
    " shared memory per block, memory in bytes. Where few of many builds were compiled, the rest"
    " was left out."
)


def section(report: Report, beside: Beside) -> doc.Section:
    """One row per variant and architecture, then the instructions of each config, then what
    fails."""
    return doc.Section("Builds", "builds", tuple(_blocks(report)))


def _blocks(report: Report) -> Iterator[doc.Block]:
    rows = tuple(_row(v["ref"], b) for v in ordered(report) for b in v["builds"])
    if rows:
        yield doc.Table(COLUMNS, rows)
        yield doc.Paragraph(_NOTE, note=True)
    yield from doc.listed([*_same(report)], doc.Paragraph)
    yield from _instructions(report)
    yield from _kinds(report)
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
        _budget(b),
        doc.Span(b["spill_build"], "code") if b["spill_build"] else text.NONE,
    )


def _same(report: Report) -> Iterator[doc.Block]:
    """A sentence of each config that has the binaries of another one."""
    for v in ordered(report):
        for b in v["builds"]:
            for same in b.get("same", ()):
                yield doc.Paragraph(
                    (
                        *(doc.Span(v["ref"], "strong"), " · ", doc.Span(b["arch"], "code"), " · "),
                        *(doc.Span(same["config"], "code"), " compiles to the binary of "),
                        *(doc.Span(same["other"], "code"), f" in {_all_of(same['builds'])}"),
                        ": it is not counted as a config of its own.",
                    ),
                    note=True,
                )


def _all_of(builds: int) -> str:
    return "the one build compared" if builds == 1 else f"all {builds} builds compared"


def _budget(b: BuildsReport) -> doc.Number:
    """The budget of the build that spills most; older reports do not know it."""
    if not b["spilling"] or "spill_budget" not in b:
        return doc.Number(None, text.NONE)
    budget = b["spill_budget"]
    return doc.Number(None, "none") if budget is None else doc.count(budget)


def _instructions(report: Report) -> Iterator[doc.Block]:
    """One row per variant and config, on one architecture; then what was not read."""
    builds = [(v["ref"], b) for v in ordered(report) for b in v["builds"]]
    arch = _arch(report, [b for _, b in builds if b.get("instructions")])
    rows = tuple(
        _instruction_row(ref, row)
        for ref, b in builds
        for row in b.get("instructions", ())
        if b["arch"] == arch
    )
    if rows:
        yield doc.Table(INSTRUCTION_COLUMNS, rows)
        yield doc.Paragraph(_INSTRUCTION_NOTE.format(arch=arch), note=True)
    if unread := sum(b.get("unread", 0) for _, b in builds):
        reason = next(b["unread_reason"] for _, b in builds if b.get("unread_reason"))
        said = f"Instructions of {text.count(unread)} compiled builds were not read: {reason}."
        yield doc.Paragraph(said, note=True)


def _arch(report: Report, builds: list[BuildsReport]) -> str:
    """The architecture to show: the device's, or the preferred one, or the first."""
    major, _, minor = str(report["device"].get("capability") or "").partition(".")
    names = [b["arch"] for b in builds]
    wanted = [name for name in names if name.rstrip("af") == f"sm_{major}{minor}"]
    return next(iter([*wanted, *(name for name in names if name == _PREFERRED), *names]), "")


def _instruction_row(ref: str, row: InstructionsReport) -> doc.Row:
    ratios = (row["other_loop"], row["other"], row["arithmetic_loop"], row["arithmetic"])
    return (
        *(doc.Span(ref, "strong"), doc.Span(row["config"], "code") if row["config"] else text.NONE),
        *(doc.count(row["builds"]), ", ".join(row["mma"])),
        *map(_ratio, ratios),
    )


def _kinds(report: Report) -> Iterator[doc.Block]:
    """One row per variant and architecture: the instructions that its declaration is held to."""
    rows = tuple(
        _kinds_row(v["ref"], b) for v in ordered(report) for b in v["builds"] if b.get("kinds")
    )
    if rows:
        yield doc.Table(("variant", "arch", "MMA", *KINDS), rows)
        yield doc.Paragraph(_KINDS_NOTE, note=True)


def _kinds_row(ref: str, b: BuildsReport) -> doc.Row:
    mma = sorted({kind for row in b.get("instructions", ()) for kind in row["mma"]})
    numbers = (_numbers(b["kinds"].get(kind, [])) for kind in KINDS)
    return (doc.Span(ref, "strong"), b["arch"], ", ".join(mma) or text.NONE, *numbers)


def _numbers(ends: list[int]) -> doc.Number:
    low, high = map(text.count, ends) if ends else (text.NONE, text.NONE)
    return doc.Number(ends[-1] if ends else None, low if low == high else f"{low} .. {high}")


def _ratio(ends: list[Number]) -> doc.Number:
    low, high = (f"{end:.2f}" for end in ends) if ends else (text.NONE, text.NONE)
    return doc.Number(ends[-1] if ends else None, low if low == high else f"{low} .. {high}")


def _broken(ref: str, b: BuildsReport) -> Iterator[doc.Block]:
    names = doc.Span(text.shorter(", ".join(b["failing"]), 200), "code")
    arch = doc.Span(b["arch"], "code")
    yield doc.Paragraph((doc.Span(ref, "strong"), " · ", arch, " · failing builds: ", names))
    yield doc.Code(text.shorter(b["error"], MESSAGE))


def broken_builds(report: Report) -> list[tuple[str, BuildsReport]]:
    """(variant, builds) for every variant and architecture where some build does not
    compile, or is not what it declares."""
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
