"""Statistics of the whole campaign as a report has them, and as both renderings show them."""

from __future__ import annotations

from collections.abc import Iterable

from verify.evidence import Verdict
from verify.report import text
from verify.report.schema import TENSORS, PoolReport, Report
from verify.statistics.limits import FALSE_ALARM
from verify.statistics.pool import pools

COLUMNS = (
    "variant",
    "dtype",
    "tensor",
    "rows",
    "rms z",
    "at most",
    "mean z",
    "mean z, signed",
    "within ±",
    "verdict",
)
NOTE = (
    "What no single case shows: errors that are each within their bound, and together too large or"
    " of one sign. z is the error in units of what the declared roundings predict, averaged over"
    " the elements of each row, and pooled over the campaign's rows. Of rms z, 1 is what they"
    " predict; mean z is near 0 unless errors lean to one side; signed: positive where results are"
    " too large in magnitude. An honest campaign is beyond any of the limits with a chance below"
    f" {FALSE_ALARM:g}. A limit far above the value: few rows, or errors of which little is known."
    " More accurate than declared is no failure: the declaration is too lenient, or the kernel was"
    " compared with itself."
)


def reports(verdicts: Iterable[Verdict]) -> list[PoolReport]:
    """One entry per (variant, dtype, tensor) with judged rows, in this order, tensors as in
    TENSORS."""
    found = sorted(
        pools(verdicts), key=lambda pool: (pool.variant, pool.dtype, TENSORS.index(pool.tensor))
    )
    return [
        {
            "variant": pool.variant,
            "dtype": pool.dtype,
            "tensor": pool.tensor,
            "cases": pool.cases,
            "rows": pool.rows,
            "rms": pool.rms,
            "mean": pool.mean,
            "toward": pool.toward,
            "slack": pool.slack,
            "least": pool.least,
            "share": pool.share,
            "rms_limit": pool.rms_limit,
            "mean_limit": pool.mean_limit,
            "failing": [name for name, _, _ in pool.excesses],
            "too_good": pool.too_good,
        }
        for pool in found
    ]


def rows(report: Report) -> list[tuple[str, ...]]:
    """Cells under COLUMNS, plain text; the variant's name stands in its first row alone."""
    found, last = [], ""
    for pool in report.get("pools", []):
        note = (
            "FAIL"
            if pool["failing"]
            else "more accurate than declared"
            if pool["too_good"]
            else "pass"
        )
        name, last = ("" if pool["variant"] == last else pool["variant"]), pool["variant"]
        numbers = (pool["rms"], pool["rms_limit"], pool["mean"], pool["toward"], pool["mean_limit"])
        tensor = text.TENSORS[pool["tensor"]]
        found.append(
            (
                name,
                pool["dtype"],
                tensor,
                text.count(pool["rows"]),
                *map(text.number, numbers),
                note,
            )
        )
    return found
