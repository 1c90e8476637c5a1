"""The plot of bench.json as SVG: TFLOP/s of each variant's fastest config, by workload."""

from __future__ import annotations

from typing import Any

from verify.document import text
from verify.report import plots, svg
from verify.timing.record import Benchmark, Row, fastest, workload_of
from verify.timing.workloads import Workload

_ROW, _GAP = 0.17, 0.42  # inches: of a bar, and between workloads
_NAME = 40  # characters of a variant's name
_TORCH, _OTHER = "#999999", "#0072B2"
_MOST = 160  # bars: more make a page large


def speed_plot(record: Benchmark) -> str | None:
    """Bars, those of torch in grey;
    None if nothing was timed."""
    groups: dict[Workload, list[Row]] = {}
    for row in fastest(record["rows"]):
        groups.setdefault(workload_of(row["workload"]), []).append(row)
    if not groups:
        return None
    kept = _first(groups)
    total = sum(_ROW * len(rows) + _GAP for rows in kept.values())
    largest = max(row["tflops"] for rows in kept.values() for row in rows)
    with plots.new_figure(7.0, total) as figure:
        top = total
        for workload, rows in kept.items():
            height = _ROW * len(rows)
            place = (0.0, (top - _GAP - height) / total, 1.0, height / total)
            _bars(figure.add_axes(place), workload, rows, largest)
            top -= height + _GAP
        drawn = [(workload.name, _drawn(rows)) for workload, rows in kept.items()]
        return svg.element(figure, "speed", "TFLOP/s by workload and variant", drawn)


def _first(groups: dict[Workload, list[Row]]) -> dict[Workload, list[Row]]:
    """The workloads in order, as many as fit, the fastest variant of each first."""
    kept: dict[Workload, list[Row]] = {}
    for workload in sorted(groups):
        bars = sum(map(len, kept.values())) + len(groups[workload])
        if kept and bars > _MOST:
            break
        kept[workload] = sorted(groups[workload], key=lambda row: -row["tflops"])
    return kept


def _drawn(rows: list[Row]) -> list[tuple[str, str, float]]:
    return [(row["variant"], row["dtype"], row["tflops"]) for row in rows]


def _bars(axes: Any, workload: Workload, rows: list[Row], largest: float) -> None:
    colours = [_TORCH if row["family"] == "torch" else _OTHER for row in rows]
    places = range(len(rows))
    axes.barh(places, [row["tflops"] for row in rows], height=0.8, color=colours)
    names = [text.shorter(text.one_line(f"{row['variant']} {row['dtype']}"), _NAME) for row in rows]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * largest)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(f"{workload.name}, TFLOP/s", fontsize=9, loc="left")
    for place, row in zip(places, rows, strict=True):
        shown = text.number(row["tflops"])
        axes.annotate(
            shown,
            (row["tflops"], place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
