"""How accurate each kernel is: errors of O in ulp, over all cases of a variant and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from verify.evidence import Verdict
from verify.report.campaign_schema import AccuracyReport
from verify.report.statistics import badness, quantile

_MEASURES = ("ulp50_out", "ulp99_out", "best50_out", "best99_out")


def reports(verdicts: Iterable[Verdict]) -> list[AccuracyReport]:
    """One entry per (variant, dtype) of which some counted case has its errors in ulp, sorted."""
    found: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.counted and _MEASURES[0] in verdict.measures:
            found[verdict.variant, verdict.dtype].append(verdict)
    return [_report(*key, found[key]) for key in sorted(found)]


def _report(variant: str, dtype: str, verdicts: list[Verdict]) -> AccuracyReport:
    ulp50, ulp99, best50, best99 = (
        sorted((v.measures[name] for v in verdicts), key=badness) for name in _MEASURES
    )
    return {
        "variant": variant,
        "dtype": dtype,
        "cases": len(verdicts),
        "ulp50": quantile(ulp50, 0.5),
        "ulp99": quantile(ulp99, 0.5),
        "ulp99_worst": ulp99[-1],
        "best50": quantile(best50, 0.5),
        "best99": quantile(best99, 0.5),
    }
