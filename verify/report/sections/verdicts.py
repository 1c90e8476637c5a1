"""Verdicts: one row per variant and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from verify.document import Inline, Number, Paragraph, Row, Section, Span, Table, ratio, text
from verify.report import words
from verify.report.beside import Beside
from verify.report.schema import DTypeReport, Oracle, Report, VariantReport
from verify.report.states import GRAVE, states
from verify.report.tables import build_counts, ordered, tensors_of, why

ORDER = 10
# measure: its column, and which of its distribution stands there
MEASURED = {"lse_ulp": ("LSE, ulp", "maximum"), "bound_ratio": ("bound / best", "median")}
_NOTE = (
    "r is the error of the worst element of all cases over its bound: above 1 the kernel is wrong."
    " LSE, ulp: largest error of the log-sum-exp in units of fp32's last place, which are tiny"
    " where the LSE is near 0: r of LSE decides. Bound / best: median of the bounds that follow"
    " from the variant's declarations over the tightest bound of that dtype; above 1, the variant"
    " asked for leniency. Refused: problems outside the declared support. A dtype passes when"
    " nothing fails and no required coverage bin is empty."
)


def section(report: Report, beside: Beside) -> Section:
    """Every variant, the failing first."""
    tensors = tensors_of(report)
    columns = (
        *("variant", "dtype", "verdict", "cases"),
        *(words.MEASURES[f"r_{name}"] for name in tensors),
        *(title for title, _ in MEASURED.values()),
        *("refused / drawn", "bins empty"),
    )
    rows = tuple(row for variant in ordered(report) for row in _rows(variant, tensors))
    return Section("Verdicts", "verdicts", (Table(columns, rows), Paragraph(_NOTE, note=True)))


def _rows(variant: VariantReport, tensors: Sequence[str]) -> Iterator[Row]:
    name, status = Span(variant["ref"], "strong"), variant["status"]
    reason = text.shorter(why(variant), 200)
    if not variant["cases"] and status != "red":
        yield name, "", (words.mark(status, 0), ": ", Span(reason, "soft"))
        return
    for d in variant["dtypes"]:
        refused = Number(
            d["refused"] / d["drawn"] if d["drawn"] else None, text.share(d["refused"], d["drawn"])
        )
        yield (
            *(name, d["dtype"], (words.mark(d["status"], d["cases"]), *_marks(variant))),
            *(tally(d), *ratios(worst_ratios(d), tensors), *measures(d)),
            *(refused, Number(len(d["bins_missing"]))),
        )
    if variant["cases"] and status == "grey":
        yield name, "", (words.mark("grey", 1), ": ", Span(reason, "soft"))
    tried, broken = build_counts(variant["builds"])
    if broken:
        said = Span(f"{broken} of {tried} builds fail", "bad")
        yield name, "builds", (words.mark("red", tried), ": ", said)


def _marks(variant: VariantReport) -> Iterator[Inline]:
    """The names of its states, those first that are grave."""
    for name in dict.fromkeys(state.name for state in states(variant)):
        yield ", "
        yield Span(name, "warn" if name in GRAVE else "soft")


def tally(report: DTypeReport | Oracle) -> Number:
    """Cases, and how many of them fail."""
    return Number(
        report["cases"], words.tally(report), look="bad" if report["failures"] else "plain"
    )


def ratios(found: Mapping[str, float], tensors: Sequence[str]) -> list[Number]:
    """The worst r of each of these tensors, of those found by name."""
    return [ratio(found.get(name)) for name in tensors]


def worst_ratios(report: DTypeReport) -> dict[str, float]:
    """The worst r of each tensor that has one."""
    return {name: tensor["worst"]["r"] for name, tensor in report["tensors"].items()}


def measures(report: DTypeReport | Oracle, names: Iterable[str] = MEASURED) -> list[Number]:
    """Those of MEASURED, each as its column has it."""
    found: dict[str, Any] = {name: report.get(name) for name in ("lse_ulp", "bound_ratio")}
    return [Number(found[name][MEASURED[name][1]] if found[name] else None) for name in names]
