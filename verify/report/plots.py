"""The two plots of a report, as SVG to put into a page: r by variant and dtype, and error with its
bound against seqlen_kv.

Of O and of the gradients, each in panels of its own; the LSE stands in the tables.

Deterministic (fixed ids, no date) and themed by the page: ink is `currentColor`, text takes the
page's font.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verify.document import text
from verify.machine.extras import need
from verify.report import svg, words
from verify.report.schema import Report, Sample, TensorReport, VariantReport
from verify.report.statistics import PLOTTED, fewer

# Okabe & Ito's palette, told apart with any colour vision and on white as on near-black.
COLOURS = {
    "float16": "#0072B2",
    "bfloat16": "#D55E00",
    "float32": "#009E73",
    "float8_e4m3fn": "#CC79A7",
    "float8_e5m2": "#E69F00",
    "float64": "#56B4E9",
}
MARKS = {
    "float16": "o",
    "bfloat16": "s",
    "float32": "^",
    "float8_e4m3fn": "D",
    "float8_e5m2": "v",
    "float64": "P",
}
_OTHER = ("#888888", "X")

_PANELS = (("Output O", ("out",)), ("Gradients dQ, dK, dV", ("dq", "dk", "dv")))
_ROW, _GAP = 0.24, 0.7  # inches: of one row, and between panels
_LETTER = 6.2  # points: a wide letter of the tick labels

_FLOOR = 2.0**-14  # r at or below it is drawn there: exact results have r = 0
_CEILING = 2.0**4
# of the largest error or bound: what is smaller would squeeze all others, and is drawn there
_DECADES = 1e-10
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attention-verify",
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": svg.INK,
    "axes.labelcolor": svg.INK,
    "axes.linewidth": 0.6,
    "text.color": svg.INK,
    "xtick.color": svg.INK,
    "ytick.color": svg.INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


# variant, dtype, tensor, and what there is of it
_Row = tuple[str, str, str, TensorReport, Sequence[Sample]]


def ratio_plot(report: Report) -> str | None:
    """r of O for every (variant, dtype), and in a panel of their own r of dQ, dK and dV: cases as
    dots, the median as a bar, the worst marked; None if nothing has an r."""
    panels = [(title, rows) for title, names in _PANELS if (rows := _rows(report, names))]
    if not panels:
        return None
    heights = [_ROW * len(rows) for _, rows in panels]
    widest = max(len(_label(row)) for _, rows in panels for row in rows)
    total = sum(heights) + _GAP * (len(panels) - 1)
    with new_figure(7.6, total) as figure:
        top = total
        for place, (title, rows) in enumerate(panels):
            axes = figure.add_axes(
                (0.0, (top - heights[place]) / total, 1.0, heights[place] / total)
            )
            _ratio_panel(axes, title, rows)
            _variant_names(axes, [row[0] for row in rows], _LETTER * widest + 18)
            top -= heights[place] + _GAP
        axes.set_xlabel("r = |error| / bound, worst element of each case")
        return svg.element(figure, "ratio", "r by variant and dtype", panels)


def _rows(report: Report, tensors: Sequence[str]) -> list[_Row]:
    return [
        (v["ref"], d["dtype"], name, d["tensors"][name], fewer(d["samples"].get(name, [])))
        for v in report["variants"]
        for d in v["dtypes"]
        for name in tensors
        if name in d["tensors"]
    ]


def _ratio_panel(axes: Any, title: str, rows: Sequence[_Row]) -> None:
    for place, (_, dtype, _, found, samples) in enumerate(rows):
        _ratio_row(axes, place, dtype, found, samples)
    axes.axvline(1.0, color=svg.INK, linewidth=1.0)
    axes.annotate(
        "r = 1: the bound",
        (1.0, 1.0),
        (4, 3),
        ("data", "axes fraction"),
        "offset points",
        fontsize=8,
    )
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xlim(_FLOOR / 1.5, _CEILING)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    ticks = [2.0**e for e in range(-14, 5, 2)]
    axes.set_xticks(ticks, ["0", *(f"1/{1 / t:g}" if t < 1 else f"{t:g}" for t in ticks[1:])])
    axes.minorticks_off()


def _label(row: _Row) -> str:
    """The dtype, and which of several tensors."""
    dtype = text.shorter(text.one_line(row[1]), 20)
    return dtype if row[2] == "out" else f"{dtype} {words.TENSORS[row[2]]}"


def _variant_names(axes: Any, refs: Sequence[str], distance: float) -> None:
    """Names left of the dtypes, at the first row of each variant, and a line between variants;
    distance in points."""
    for place, ref in enumerate(refs):
        if place and ref == refs[place - 1]:
            continue
        name = text.shorter(text.one_line(ref), 36)
        axes.annotate(
            name,
            (0, place),
            (-distance, 0),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            va="center",
        )
        if place:
            axes.axhline(place - 0.5, color=svg.INK, linewidth=0.4, alpha=0.25)


def _ratio_row(
    axes: Any, place: int, dtype: str, report: TensorReport, samples: Sequence[Sample]
) -> None:
    colour, mark = _look(dtype)
    found = [_on_axis(s["r"]) for s in samples if s["r"] is not None]
    # A fixed pattern spreads the dots over the row: random jitter would differ between reports.
    heights = [place + 0.22 * math.sin(2.399963 * i) for i in range(len(found))]
    axes.plot(
        found,
        heights,
        ".",
        color=colour,
        markersize=3.2,
        alpha=0.6,
        markeredgewidth=0,
        clip_on=False,
    )
    median, worst = _on_axis(report["r"]["median"]), report["r"]["maximum"]
    axes.plot(
        [median, median], [place - 0.3, place + 0.3], color=svg.INK, linewidth=1.4, clip_on=False
    )
    beyond = not worst <= 1
    axes.plot(
        _on_axis(worst),
        place,
        "X" if beyond else mark,
        color=colour,
        markersize=7,
        markeredgecolor=svg.INK,
        markeredgewidth=0.7,
        clip_on=False,
    )
    if beyond:
        axes.annotate(
            text.number(worst),
            (_on_axis(worst), place),
            (6, -3),
            textcoords="offset points",
            fontsize=8,
        )


def _on_axis(r: float | None) -> float:
    """r as far as the axis reaches."""
    if r is None or math.isnan(r):
        return _CEILING / 2
    return min(max(r, _FLOOR), _CEILING / 2)


def error_plot(variant: VariantReport, key: str) -> str | None:
    """The largest error of each case and the bound at that element against seqlen_kv: a row per
    tensor, a panel per dtype.

    key: distinguishes the ids in this SVG from those of others in the page.  None if no case has an
    error.
    """
    drawn = {
        (d["dtype"], name): _with_error(d["samples"].get(name, []))
        for d in variant["dtypes"]
        for name in PLOTTED
    }
    tensors = [
        name
        for name in PLOTTED
        if any(s["max_error"] for (_, n), found in drawn.items() if n == name for s in found)
    ]
    dtypes = [
        d["dtype"] for d in variant["dtypes"] if any(drawn[d["dtype"], name] for name in tensors)
    ]
    if not dtypes:
        return None
    with new_figure(9.0, 2.6 if len(tensors) == 1 else 2.1 * len(tensors)) as figure:
        grid = figure.subplots(
            len(tensors), max(len(dtypes), 2), sharex=True, sharey="row", squeeze=False
        )
        for name, row in zip(tensors, grid, strict=True):
            floor = _DECADES * max(
                size for dtype in dtypes for s in drawn[dtype, name] for size in _sizes(s)
            )
            for axes, dtype in zip(row, dtypes, strict=False):
                _error_panel(axes, dtype, drawn[dtype, name], floor)
            for axes in row[len(dtypes) :]:
                axes.set_visible(False)
            row[0].set_ylabel(f"largest error of {words.TENSORS[name]}")
        for axes in grid[-1]:
            axes.set_xlabel("seqlen_kv")
        figure.subplots_adjust(0.0, 0.0, 1.0, 1.0, wspace=0.08, hspace=0.3)
        told = [(dtype, name, drawn[dtype, name]) for dtype in dtypes for name in tensors]
        return svg.element(figure, key, "error and bound against seqlen_kv", told)


def _with_error(samples: Sequence[Sample]) -> list[Sample]:
    finite = [s for s in samples if s["max_error"] is not None and math.isfinite(s["max_error"])]
    return fewer(finite)


def _sizes(sample: Sample) -> list[float]:
    """Its error and bound, as far as they are finite."""
    return [
        size
        for size in (sample["max_error"], sample["error_bound"])
        if size is not None and math.isfinite(size)
    ]


def _error_panel(axes: Any, dtype: str, points: Sequence[Sample], floor: float) -> None:
    colour, mark = _look(dtype)
    bounds = [
        (s["seqlen_kv"], s["error_bound"])
        for s in points
        if s["error_bound"] and math.isfinite(s["error_bound"])
    ]
    bounds = [(keys, max(bound, floor)) for keys, bound in bounds]
    errors = [(s["seqlen_kv"], max(s["max_error"], floor)) for s in points if s["max_error"]]
    exact = len(points) - len(errors)
    axes.plot(*_columns(bounds), "_", color=svg.INK, markersize=6, alpha=0.55, clip_on=False)
    look = {"markersize": 3.6, "alpha": 0.75, "markeredgewidth": 0, "clip_on": False}
    axes.plot(*_columns(errors), mark, color=colour, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    title = text.shorter(text.one_line(dtype), 30) + (
        f"  ({exact} exact, not drawn)" if exact else ""
    )
    axes.set_title(title, fontsize=9, loc="left")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_major_formatter(
        lambda value, place: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    )
    axes.minorticks_off()
    axes.grid(visible=True, color=svg.INK, alpha=0.12, linewidth=0.5, clip_on=False)
    axes.tick_params(bottom=False, left=False)  # the grid shows the places


def _columns(pairs: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float | None]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _look(dtype: str) -> tuple[str, str]:
    return COLOURS.get(dtype, _OTHER[0]), MARKS.get(dtype, _OTHER[1])


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Any]:
    """A figure of that size in inches, drawn without pyplot, so that no global state and no display
    is touched.  Raises MissingPackageError without matplotlib."""
    need("matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user can have a matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        yield Figure(figsize=(width, height))
