"""Ranking: how accurate each kernel is in units of O's last place, beside the best possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from verify.document import Number, Paragraph, Row, Section, Span, Table, ratio
from verify.report.beside import Beside
from verify.report.campaign_schema import AccuracyReport
from verify.report.schema import Report
from verify.report.statistics import badness

ORDER = 20
_COLUMNS = (
    "rank",
    "variant",
    "dtype",
    "median, ulp",
    "best",
    "99 %, ulp",
    "best",
    "99 % of the worst case",
    "rms z",
    "r of O",
    "cases",
)
_NOTE = (
    "Errors of O. An ulp is the spacing of O's format at the element, or at the root mean square of"
    " its row where that is larger: where terms cancel, a small element holds the rounding errors"
    " of its row. Each case has a median and a 99th percentile over its elements; shown is the"
    " median of all cases, and the largest 99th percentile. Best: the same of O rounded correctly,"
    " on the same cases: 0.5 ulp is the most that it can be off. Rms z: the error in units of what"
    " the declared roundings predict; 1 is honest arithmetic as declared. Ranks are those of a"
    " dtype, by the median and then by the 99th percentile. They decide nothing: a verdict is r."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per (variant, dtype) that has an r of O, ranked within its dtype."""
    ratios = {
        (v["ref"], d["dtype"]): d["tensors"]["out"]["worst"]["r"]
        for v in report["variants"]
        for d in v["dtypes"]
        if "out" in d["tensors"]
    }
    if not ratios:
        return None
    rows = tuple(_rows(report, ratios))
    return Section("Ranking", "ranking", (Table(_COLUMNS, rows), Paragraph(_NOTE, note=True)))


def _rows(report: Report, ratios: dict[tuple[str, str], float]) -> Iterator[Row]:
    found = {(one["variant"], one["dtype"]): one for one in report.get("accuracy", [])}
    pools = {
        (pool["variant"], pool["dtype"]): pool["rms"]
        for pool in report.get("pools", [])
        if pool["tensor"] == "out"
    }
    places: Counter[str] = Counter()
    for one in sorted(found.values(), key=_order):
        key = one["variant"], one["dtype"]
        places[one["dtype"]] += 1
        medians = one["ulp50"], one["best50"]
        tails = one["ulp99"], one["best99"], one["ulp99_worst"]
        yield (
            Number(places[one["dtype"]]),
            Span(one["variant"], "strong"),
            one["dtype"],
            *map(Number, (*medians, *tails)),
            Number(pools.get(key)),
            ratio(ratios.get(key)),
            Number(one["cases"]),
        )
    for ref, dtype in sorted(ratios.keys() - found.keys(), key=lambda key: (key[1], key[0])):
        none = [Number(None, "not measured"), *[Number(None)] * 4]
        z, r = Number(pools.get((ref, dtype))), ratio(ratios[ref, dtype])
        yield Number(None), Span(ref, "strong"), dtype, *none, z, r, Number(None)


def _order(one: AccuracyReport) -> tuple[object, ...]:
    return one["dtype"], badness(one["ulp50"]), badness(one["ulp99"]), one["variant"]
