"""The report as one HTML page that opens offline: no script, no address outside itself, everything from kernels escaped."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verify.report import contract, plots, pooled, text
from verify.report.schema import Distribution, Report
from verify.report.tables import (
    BUILD_COLUMNS,
    broken_builds,
    build_counts,
    build_rows,
    declarations,
    device_rows,
    headline,
    histogram,
    not_built,
    ordered,
    scope,
    tensors_in,
    tensors_of,
    worst_of,
)


def render(report: Report) -> str:
    """The page.  The same report gives the same bytes, with the same versions of jinja2 and matplotlib."""
    environment = Environment(
        loader=PackageLoader("verify.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_clean,
    )
    filters: dict[str, Any] = {
        "number": text.number,
        "exact": text.exact,
        "ratio": text.ratio,
        "seconds": text.seconds,
    }
    environment.filters.update(filters)
    template = environment.get_template("report.html.j2")
    return template.render(
        report=report,
        headline=headline(report),
        device=device_rows(report),
        contract_matrix=contract.html({v["ref"]: v.get("measured", {}) for v in ordered(report)}),
        declarations=declarations(report),
        variants=ordered(report),
        ratio_plot=_markup(plots.ratio_plot(report)),
        error_plots=[_markup(plots.error_plot(v, f"v{i}")) for i, v in enumerate(ordered(report))],
        label=text.label,
        tally=text.tally,
        share=text.share,
        scope=scope,
        tensors=tensors_of(report),
        tensors_in=tensors_in,
        measures=text.MEASURES,
        worst_of=worst_of,
        pool_columns=pooled.COLUMNS,
        pool_rows=pooled.rows(report),
        pool_note=pooled.NOTE,
        build_columns=BUILD_COLUMNS,
        build_rows=build_rows(report),
        build_counts=build_counts,
        broken_builds=broken_builds(report),
        not_built=not_built(report),
        histogram=_bars,
    )


def _clean(value: Any) -> Any:
    """Every text on its way into the page loses its control characters, before jinja2 escapes it."""
    return text.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _markup(svg: str | None) -> Markup | None:
    """SVG of our own making, whose texts matplotlib has escaped."""
    return None if svg is None else Markup(svg)


def _bars(found: Distribution) -> list[dict[str, Any]]:
    """Bars of a histogram: height in percent of the tallest, and what a pointer shows."""
    most = max([count for _, count in histogram(found)], default=0) or 1
    return [
        {"height": round(100 * count / most), "hint": f"{name}: {count}", "count": count} for name, count in histogram(found)
    ]
