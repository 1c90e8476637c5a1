"""The report as one HTML page that opens offline: no script, no address outside itself, everything
from kernels escaped."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verify.report import contract, plots, pooled, probed, sanitized, text, tight
from verify.report.beside import Beside
from verify.report.headline import headline
from verify.report.rate import NOTE as RATE_NOTE
from verify.report.rate import rate
from verify.report.schema import Distribution, Report
from verify.report.states import CLAIMS, GRAVE, claimed, claims, states, unjudged
from verify.report.tables import (
    BUILD_COLUMNS,
    broken_builds,
    build_counts,
    build_rows,
    closest,
    declarations,
    device_rows,
    grouped,
    histogram,
    not_built,
    oracles_of,
    ordered,
    scope,
    tensors_in,
    tensors_of,
    why,
    worst_of,
)


def render(report: Report, beside: Beside | None = None, ratio_plot: str | None = None) -> str:
    """The page.  The same report gives the same bytes, with the same versions of jinja2 and
    matplotlib.

    beside: what lies beside the report, whose entries `verify.report.beside.joined` has put into
    it. ratio_plot: that of `verify.report.plots`, where it is drawn already.
    """
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
        ratio_plot=_markup(ratio_plot or plots.ratio_plot(report)),
        error_plots=[_markup(plots.error_plot(v, f"v{i}")) for i, v in enumerate(ordered(report))],
        label=text.label,
        tally=text.tally,
        share=text.share,
        scope=scope,
        tensors=tensors_of(report),
        tensors_in=tensors_in,
        measures=text.MEASURES,
        worst_of=worst_of,
        oracles_of=oracles_of,
        tight_columns=tight.COLUMNS,
        tight_rows=tight.rows(report),
        tight_note=tight.NOTE,
        pool_columns=pooled.COLUMNS,
        pool_rows=pooled.rows(report),
        pool_note=pooled.NOTE,
        build_columns=BUILD_COLUMNS,
        build_rows=build_rows(report),
        build_counts=build_counts,
        broken_builds=broken_builds(report),
        not_built=not_built(report),
        histogram=_bars,
        claimed=claimed,
        claims=claims,
        states=states,
        unjudged=unjudged,
        grave=GRAVE,
        claims_note=CLAIMS,
        rate=rate,
        rate_note=RATE_NOTE,
        of_failing=text.of_failing,
        closest=closest(report),
        why=why,
        moment=text.moment,
        **_beside(report, beside or Beside()),
    )


def _beside(report: Report, beside: Beside) -> dict[str, Any]:
    """What the sections of the probes and of the sanitizers show.  told: the entries by name, None
    where there is none."""
    probes, account = beside.probes, beside.sanitizer
    shown: dict[str, Any] = {
        "beside": beside,
        "told": {"probes": None, "sanitizer": None}
        | {entry["name"]: entry for entry in report.get("beside", [])},
        "matrix_columns": probed.MATRIX_COLUMNS,
        "function_columns": probed.FUNCTION_COLUMNS,
        "order_columns": probed.ORDER_COLUMNS,
        "probe_note": probed.NOTE,
        "sanitizer_columns": sanitized.COLUMNS,
    }
    if probes is not None:
        shown |= {
            "probe_faults": probed.faults(probes),
            "matrix_rows": probed.matrix_rows(probes),
            "function_rows": probed.function_rows(probes),
            "order_rows": probed.order_rows(probes),
            "probes_left": grouped((left.name, left.reason) for left in probes.not_run),
        }
    if account is not None:
        tools, planted = sanitized.planted(account)
        shown |= {
            "sanitizer_rows": sanitized.rows(account, report),
            "sanitizer_findings": sanitized.findings(account),
            "planted_tools": tools,
            "planted_rows": planted,
            "sanitizer_left": grouped(
                (left["variant"], left["reason"]) for left in account["not_run"]
            ),
        }
    return shown


def _clean(value: Any) -> Any:
    """Every text on its way into the page loses its control characters, before jinja2 escapes
    it."""
    return text.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _markup(svg: str | None) -> Markup | None:
    """SVG of our own making, whose texts matplotlib has escaped."""
    return None if svg is None else Markup(svg)


def _bars(found: Distribution) -> list[dict[str, Any]]:
    """Bars of a histogram: height in percent of the tallest, and what a pointer shows."""
    most = max([count for _, count in histogram(found)], default=0) or 1
    return [
        {"height": round(100 * count / most), "hint": f"{name}: {count}", "count": count}
        for name, count in histogram(found)
    ]
