"""Profiles: what explains the speed of kernels, if profiles.json lies beside the report."""

from __future__ import annotations

from collections.abc import Mapping

from verify.document import Line, Number, Paragraph, Row, Section, Span, Table, seconds, text
from verify.profiling.metrics import QUANTITIES
from verify.profiling.record import Profile, ProfiledKernel
from verify.report.beside import Beside, introduced
from verify.report.schema import Report

ORDER = 97
_SHOWN = tuple(
    quantity
    for quantity in QUANTITIES
    if quantity.key
    in {
        *("duration", "tensor_pipe", "issue_slots", "occupancy", "l2", "dram"),
        *("conflicts_ldsm", "conflicts_ld", "local_sectors"),
    }
)
_MOST_STALLS = 2
_NOTE = (
    "Counted by ncu, clocks left alone, one launch each. Bank conflicts of ldmatrix are 0 where"
    " tiles are swizzled or padded; sectors of local memory are spills. The last column has the"
    " cycles that a warp waits for the commonest reasons between two instructions."
)


def section(report: Report, beside: Beside) -> Section | None:
    """A row for each kernel of each profiled launch; None if there is no profiles.json."""
    if beside.profiles is None and "profiles" not in beside.unusable:
        return None
    found = Section("Profiles", "profiles", ())
    if beside.profiles is not None:
        sources = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
        labels = (quantity.label for quantity in _SHOWN)
        columns = ("variant", "config", "problem", "kernel", *labels, "waits for")
        rows = tuple(
            _row(one, kernel, sources)
            for one in beside.profiles["profiles"]
            for kernel in one["kernels"]
        )
        blocks = Table(columns, rows), Paragraph(_NOTE, note=True)
        found = Section("Profiles", "profiles", blocks)
    return introduced(found, report, "profiles", "")


def _row(one: Profile, kernel: ProfiledKernel, sources: Mapping[str, str]) -> Row:
    same = sources.get(one["variant"]) in (None, one["source_hash"])
    stale = "another source than this report's"
    waits = [f"{why} {cycles:.2f}" for why, cycles in kernel["stalls"].items()][:_MOST_STALLS]
    return (
        Span(one["variant"], "strong"),
        Span(one["config"], "code"),
        Span(one["problem"], "code"),
        Span(kernel["name"], "code") if same else Span(stale, "bad"),
        *(_number(quantity.unit, kernel["values"].get(quantity.key)) for quantity in _SHOWN),
        ", ".join(waits) or text.NONE,
    )


def _number(unit: str, value: float | None) -> Line:
    if unit == "s":
        return seconds(value)
    return Number(value, "" if value is None or unit != "%" else f"{value:.1f}", unit)
