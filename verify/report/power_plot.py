"""The plot of certificates as SVG: the smallest fault of each class that a variant's campaign would
have convicted, beside what other suites' rules catch."""

from __future__ import annotations

from typing import Any

from verify.report import plots, svg
from verify.report.power import FAULTS
from verify.report.rival_power import RIVALS
from verify.report.schema import Report

RULES = {
    "FlashAttention 2x": "D",
    "PyTorch SDPA": "s",
    "cuDNN 2e-2": "^",
    "Triton tutorial 1e-2": "v",
}
"""Rules by name, and the mark of each."""

_ROW, _LEGEND = 0.26, 0.8  # inches
_LEAST, _MOST = 1e-7, 2.0


def power_plot(report: Report) -> str | None:
    """A panel for each 16-bit dtype, a row for each class; None if nothing is certified there."""
    dtypes = [d for d in ("float16", "bfloat16") if any(strengths(report, d).values())]
    if not dtypes:
        return None
    faults = [f for f in FAULTS if any(strengths(report, dtype)[f] for dtype in dtypes)]
    height = _ROW * len(faults) + _LEGEND
    with plots.new_figure(3.4 * len(dtypes), height) as figure:
        wide = 1.0 / len(dtypes)
        for place, dtype in enumerate(dtypes):
            low = _LEGEND / height
            axes = figure.add_axes((place * wide, low, 0.93 * wide, 1 - low))
            _panel(axes, dtype, faults, report)
            axes.set_yticks(
                range(len(faults)), [FAULTS[f] for f in faults] if not place else [""] * len(faults)
            )
        _legend(figure, dtypes)
        drawn = [(dtype, strengths(report, dtype)) for dtype in dtypes]
        return svg.element(figure, "power", "smallest fault noticed, by class", drawn)


def strengths(report: Report, dtype: str) -> dict[str, list[float]]:
    """The strengths of all variants in that dtype, by class."""
    found: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for one in report.get("power", []):
        if one["dtype"] == dtype and one["fault"] in found:
            found[one["fault"]].append(one["strength"])
    return found


def _panel(axes: Any, dtype: str, faults: list[str], report: Report) -> None:
    found = strengths(report, dtype)
    for place, fault in enumerate(faults):
        values = [min(max(e, _LEAST), _MOST) for e in found[fault]]
        axes.plot(
            values,
            [place] * len(values),
            plots.MARKS[dtype],
            color=plots.COLOURS[dtype],
            markersize=5,
            alpha=0.7,
            markeredgewidth=0,
            clip_on=False,
        )
        for rule, mark in RULES.items():
            e = RIVALS.get(rule, {}).get(dtype, {}).get(fault)
            if e is not None:
                axes.plot(e, place, mark, **_HOLLOW)
    axes.set_title(dtype, fontsize=9, loc="left")
    axes.set_xscale("log", base=10)
    axes.set_xlim(_LEAST, _MOST)
    axes.set_ylim(len(faults) - 0.5, -0.5)
    axes.set_xticks([10.0**n for n in range(-7, 1)], [f"1e{n}" for n in range(-7, 0)] + ["1"])
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("e, the strength of the smallest fault noticed")
    axes.grid(visible=True, axis="both", color=svg.INK, alpha=0.12, linewidth=0.5)


_HOLLOW: Any = {
    "color": "none",
    "markersize": 5,
    "markeredgecolor": svg.INK,
    "markeredgewidth": 0.8,
    "clip_on": False,
}


def _legend(figure: Any, dtypes: list[str]) -> None:
    from matplotlib.lines import Line2D

    own = [
        Line2D([], [], marker=plots.MARKS[d], color=plots.COLOURS[d], linestyle="", label=f"{said}")
        for d, said in ((d, f"this campaign, {d}") for d in dtypes)
    ]
    rules = [
        Line2D([], [], marker=mark, linestyle="", label=rule, **_HOLLOW)
        for rule, mark in RULES.items()
    ]
    figure.legend(
        handles=[*own, *rules],
        loc="lower left",
        bbox_to_anchor=(0.0, -0.02),
        ncols=3,
        frameon=False,
        fontsize=8,
        handletextpad=0.2,
        columnspacing=1.2,
    )
