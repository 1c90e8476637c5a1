"""How accurate each kernel is: errors of O in ulp, over all cases of a variant and dtype."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import Block, Column, blocks
from verify.report.campaign_schema import AccuracyReport
from verify.report.statistics import quantile

_MEASURES = ("ulp50_out", "ulp99_out", "best50_out", "best99_out")


def reports(verdicts: Iterable[Verdict]) -> list[AccuracyReport]:
    """One entry per (variant, dtype) of which some counted case has its errors in ulp, sorted."""
    return [
        _report(*key, found)
        for key, found in Verdicts.of(verdicts).counted.by_dtype().items()
        if blocks(found, _MEASURES[0])
    ]


def _report(variant: str, dtype: str, verdicts: Verdicts) -> AccuracyReport:
    having = blocks(verdicts, _MEASURES[0])
    ulp50, ulp99, best50, best99 = (
        np.sort(Column(having, partial(Block.measure, name=name)).values) for name in _MEASURES
    )
    return {
        "variant": variant,
        "dtype": dtype,
        "cases": len(ulp50),
        "ulp50": quantile(ulp50, 0.5),
        "ulp99": quantile(ulp99, 0.5),
        "ulp99_worst": float(ulp99[-1]),
        "best50": quantile(best50, 0.5),
        "best99": quantile(best99, 0.5),
    }
