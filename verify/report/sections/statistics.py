"""Statistics of the whole campaign: errors of each tensor beside what the declarations predict."""

from __future__ import annotations

from verify.document import Number, Paragraph, Row, Section, Span, Table, count
from verify.report import words
from verify.report.beside import Beside
from verify.report.campaign_schema import PoolReport
from verify.report.schema import Report
from verify.statistics.limits import FALSE_ALARM

ORDER = 70
_COLUMNS = (
    "variant",
    "dtype",
    "tensor",
    "rows",
    "rms z",
    "at most",
    "mean z",
    "mean z, signed",
    "within ±",
)
_WEIGHED = ("weighed", "at most")
_NOTE = (
    "What no single case shows: errors that are each within their bound, and together too large"
    " or of one sign. z is the error in units of what the declared roundings predict, averaged"
    " over the elements of each row, and pooled over the campaign's rows. Rms z, the root of its"
    " mean square, is 1 where errors are as large as predicted. Mean z is near 0 unless errors"
    " lean to one side; its signed form is positive where results are too large in magnitude. An"
    f" honest campaign is beyond any of the limits with a chance below {FALSE_ALARM:g}. A limit"
    " far above the value: few rows, or errors of which little is known. More accurate than"
    " declared is no failure: the declaration is too lenient, or the kernel was compared with"
    " itself."
)
_OF_WEIGHTS = (
    " Weighed is the same where elements count by how much of what is predicted comes from errors"
    " of P, or of dS: it hears errors of single weights."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per variant, dtype and tensor whose rows were judged."""
    pools = report.get("pools", [])
    if not pools:
        return None
    weighed = any("weighed" in pool for pool in pools)
    rows = tuple(_row(pool, weighed=weighed) for pool in pools)
    columns = (*_COLUMNS, *(_WEIGHED if weighed else ()), "verdict")
    note = Paragraph(_NOTE + (_OF_WEIGHTS if weighed else ""), note=True)
    return Section("Statistics of the campaign", "statistics", (note, Table(columns, rows)))


def _row(pool: PoolReport, *, weighed: bool) -> Row:
    verdict = Span("more accurate than declared") if pool["too_good"] else Span("pass", "good")
    verdict = Span("FAIL", "bad") if pool["failing"] else verdict
    numbers = [pool["rms"], pool["rms_limit"], pool["mean"], pool["toward"], pool["mean_limit"]]
    cells: Row = tuple(map(Number, numbers))
    if weighed and "weighed" in pool:
        cells = (*cells, Number(pool["weighed"]), Number(pool["weighed_limit"]))
    elif weighed:
        cells = (*cells, "–", "–")
    name, tensor = Span(pool["variant"], "strong"), words.TENSORS[pool["tensor"]]
    return name, pool["dtype"], tensor, count(pool["rows"]), *cells, verdict
