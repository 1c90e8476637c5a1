"""The two plots of a report, as SVG to put into a page: r by variant and dtype, and error with its bound against seqlen_kv.

Deterministic (fixed ids, no date) and themed by the page: ink is `currentColor`, text takes the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verify.report import text
from verify.report.schema import DTypeReport, Report, Sample, VariantReport

# Okabe & Ito's palette, told apart with any colour vision and on white as on near-black.
COLOURS = {
    "float16": "#0072B2",
    "bfloat16": "#D55E00",
    "float32": "#009E73",
    "float8_e4m3fn": "#CC79A7",
    "float8_e5m2": "#E69F00",
    "float64": "#56B4E9",
}
MARKS = {"float16": "o", "bfloat16": "s", "float32": "^", "float8_e4m3fn": "D", "float8_e5m2": "v", "float64": "P"}
_OTHER = ("#888888", "X")

_INK = "#0a0b0c"  # stands for currentColor, which matplotlib does not know
_SCALE = 1.55  # CSS pixels per point at full width: 9 pt are 14 px
_FLOOR = 2.0**-14  # r at or below it is drawn there: exact results have r = 0
_CEILING = 2.0**4
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attention-verify",
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def ratio_plot(report: Report) -> str | None:
    """r of O for every (variant, dtype): cases as dots, the median as a bar, the worst marked; None if nothing has an r."""
    rows = [(v, d) for v in report["variants"] for d in v["dtypes"] if d["r_out"] is not None]
    if not rows:
        return None
    with _figure(7.6, 0.75 + 0.24 * len(rows)) as figure:
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        for place, (_, d) in enumerate(rows):
            _ratio_row(axes, place, d)
        _variant_names(axes, [v["ref"] for v, _ in rows])
        axes.axvline(1.0, color=_INK, linewidth=1.0)
        axes.annotate("r = 1: the bound", (1.0, 1.0), (4, 3), ("data", "axes fraction"), "offset points", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlim(_FLOOR / 1.5, _CEILING)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [text.one_line(d["dtype"]) for _, d in rows])
        axes.tick_params(axis="y", length=0)
        ticks = [2.0**e for e in range(-14, 5, 2)]
        axes.set_xticks(ticks, ["0", *(f"1/{1 / t:g}" if t < 1 else f"{t:g}" for t in ticks[1:])])
        axes.minorticks_off()
        axes.set_xlabel("r = |O - reference| / bound, worst element of each case")
        return _svg(figure, "ratio", "r by variant and dtype")


def _variant_names(axes: Any, refs: Sequence[str]) -> None:
    """Names left of the dtypes, at the first row of each variant, and a line between variants."""
    for place, ref in enumerate(refs):
        if place and ref == refs[place - 1]:
            continue
        name = text.shorter(text.one_line(ref), 36)
        axes.annotate(name, (0, place), (-70, 0), ("axes fraction", "data"), "offset points", ha="right", va="center")
        if place:
            axes.axhline(place - 0.5, color=_INK, linewidth=0.4, alpha=0.25)


def _ratio_row(axes: Any, place: int, report: DTypeReport) -> None:
    colour, mark = _look(report["dtype"])
    found = [_on_axis(s["r_out"]) for s in report["samples"] if s["r_out"] is not None]
    # A fixed pattern spreads the dots over the row: random jitter would differ between reports.
    heights = [place + 0.22 * math.sin(2.399963 * i) for i in range(len(found))]
    axes.plot(found, heights, ".", color=colour, markersize=3.2, alpha=0.6, markeredgewidth=0)
    spread = report["r_out"]
    if spread is None:
        return
    median, worst = _on_axis(spread["median"]), spread["maximum"]
    axes.plot([median, median], [place - 0.3, place + 0.3], color=_INK, linewidth=1.4)
    beyond = not worst <= 1
    axes.plot(
        _on_axis(worst), place, "X" if beyond else mark, color=colour, markersize=7, markeredgecolor=_INK, markeredgewidth=0.7
    )
    if beyond:
        axes.annotate(text.number(worst), (_on_axis(worst), place), (6, -3), textcoords="offset points", fontsize=8)


def _on_axis(r: float | None) -> float:
    """r as far as the axis reaches."""
    if r is None or math.isnan(r):
        return _CEILING / 2
    return min(max(r, _FLOOR), _CEILING / 2)


def error_plot(variant: VariantReport, key: str) -> str | None:
    """max |O - reference| of each case and the bound at that element against seqlen_kv, one panel per dtype.

    key: distinguishes the ids in this SVG from those of others in the page.  None if no case has an error.
    """
    panels = [(d, points) for d in variant["dtypes"] if (points := [s for s in d["samples"] if _finite(s["max_error"])])]
    if not any(s["max_error"] for _, points in panels for s in points):
        return None
    with _figure(9.0, 2.6) as figure:
        every = figure.subplots(1, max(len(panels), 2), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (d, points) in zip(every, panels, strict=False):
            _error_panel(axes, d["dtype"], points)
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        every[0].set_ylabel("largest |O - reference|")
        figure.subplots_adjust(0.0, 0.0, 1.0, 1.0, wspace=0.08)
        return _svg(figure, key, "error and bound against seqlen_kv")


def _error_panel(axes: Any, dtype: str, points: Sequence[Sample]) -> None:
    colour, mark = _look(dtype)
    bounds = [(s["seqlen_kv"], s["error_bound"]) for s in points if s["error_bound"] and _finite(s["error_bound"])]
    errors = [(s["seqlen_kv"], s["max_error"]) for s in points if s["max_error"]]
    exact = len(points) - len(errors)
    axes.plot(*_columns(bounds), "_", color=_INK, markersize=6, alpha=0.55)
    axes.plot(*_columns(errors), mark, color=colour, markersize=3.6, alpha=0.75, markeredgewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_title(text.one_line(dtype) + (f"  ({exact} exact, not drawn)" if exact else ""), fontsize=9, loc="left")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e"))
    axes.minorticks_off()
    axes.grid(visible=True, color=_INK, alpha=0.12, linewidth=0.5)
    axes.set_xlabel("seqlen_kv")


def _columns(pairs: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float | None]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _look(dtype: str) -> tuple[str, str]:
    return COLOURS.get(dtype, _OTHER[0]), MARKS.get(dtype, _OTHER[1])


@contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    """A figure of that size in inches, drawn without pyplot, so that no global state and no display is touched."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whoever renders may have a matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        yield Figure(figsize=(width, height))


def _svg(figure: Any, key: str, label: str) -> str:
    """The figure as an <svg> element; matplotlib has escaped all text in it."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.05, metadata=nothing)
    image = stream.getvalue()
    image = image[image.index("<svg") :]
    image = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", image, flags=re.DOTALL)
    image = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{key}-", image)
    image = re.sub(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', _opening_tag(label), image, count=1)
    return re.sub(r"\n\s*", "\n", image.replace(_INK, "currentColor"))


def _opening_tag(label: str) -> Callable[[re.Match[str]], str]:
    """As wide as the page allows, but no wider than makes the text larger than the page's."""

    def tag(found: re.Match[str]) -> str:
        width, height = float(found[1]), float(found[2])
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        size = f'viewBox="0 0 {width:.1f} {height:.1f}" style="max-width: {width * _SCALE:.0f}px"'
        return f'<svg {spaces} {size} role="img" aria-label="{label}">'

    return tag
