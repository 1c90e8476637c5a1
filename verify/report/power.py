"""Certificates of power: the smallest strength of each class of faults, and the case that says it
(docs/power.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import Column, blocks, column
from verify.report import replays
from verify.report.campaign_schema import PowerReport
from verify.report.schema import Report
from verify.statistics.pool import Pool, pools
from verify.statistics.verdicts import campaign_case

_PREFIX = "power_"
FAULTS: Mapping[str, str] = {
    "scale": "softmax_scale (1 + e)",
    "exponent": "exponents (1 + e)",
    "lse": "LSE + e",
    "key": "a key of weight e lost",
    "out": "O (1 + e)",
    "element": "one element of O, by e rms of its row",
    "dq": "dQ (1 + e)",
    "dk": "dK (1 + e)",
    "dv": "dV (1 + e)",
    "read_lse": "LSE + e, as the backward reads it",
    "delta": "delta (1 + e)",
    "ds_pair": "the dS of a pair of weight e lost",
    "noise": "P noisier, by e of its roundings",
    "ds_noise": "dS noisier, by e of its roundings",
}
"""Classes of faults, in the order of every table, and what e is in each."""

_POOLED = {"out": "noise", "dq": "ds_noise"}  # tensors whose pools certify a class


def reports(verdicts: Iterable[Verdict], pooled: Sequence[Pool] | None = None) -> list[PowerReport]:
    """One entry per (variant, dtype, class) that a counted, passing case certifies, or the
    statistics of all, in this order.

    pooled: the pools of these verdicts, if they are known.  Of equal strengths the case with the
    first name counts.  Evidence of an earlier day has none.
    """
    verdicts = Verdicts.of(verdicts)
    passing = verdicts.where(lambda shape, said: shape.counted and said.outcome == "pass")
    reported = list(_of_pools(pools(verdicts) if pooled is None else pooled))
    for key, found in passing.by_dtype().items():
        for fault in FAULTS:
            strengths = column(found, f"{_PREFIX}{fault}")
            if len(strengths):
                reported.append(_report(*key, fault, found, strengths))
    order = list(FAULTS)
    return sorted(
        reported, key=lambda one: (one["variant"], one["dtype"], order.index(one["fault"]))
    )


def _of_pools(pooled: Iterable[Pool]) -> Iterator[PowerReport]:
    """What the statistics of the campaign certify; the case is their verdict on the pool."""
    for pool in pooled:
        fault = _POOLED.get(pool.tensor)
        if fault is not None and math.isfinite(pool.noise) and not list(pool.excesses):
            yield {
                "variant": pool.variant,
                "dtype": pool.dtype,
                "fault": fault,
                "cases": pool.cases,
                "strength": pool.noise,
                "case": campaign_case(pool),
                "tutorial": None,
                "close": None,
            }


def _report(
    variant: str, dtype: str, fault: str, verdicts: Verdicts, strengths: Column
) -> PowerReport:
    best = strengths.first_of(strengths.smallest)
    found: PowerReport = {
        "variant": variant,
        "dtype": dtype,
        "fault": fault,
        "cases": len(strengths),
        "strength": strengths.smallest,
        "case": best.case,
        "tutorial": _least(verdicts, fault, "tutorial"),
        "close": _least(verdicts, fault, "close"),
    }
    if replay := replays.unusual(best.case):
        found["replay"] = replay
    return found


def _least(verdicts: Verdicts, fault: str, rule: str) -> float | None:
    """The smallest fault that another rule would have convicted, of the cases that certify one."""
    measure = f"{rule}_{fault}"
    having = blocks(verdicts, f"{_PREFIX}{fault}", measure)
    return Column(having, lambda block: block.measure(measure)).smallest if having else None


def summary(report: Report) -> str | None:
    """One sentence on the first class of which anything is certified: the least and the largest
    strength over variants and dtypes; None for a report without any."""
    entries = report.get("power", [])
    for fault, words in FAULTS.items():
        found = [one["strength"] for one in entries if one["fault"] == fault]
        if found:
            return (
                f"Smallest fault that would have failed: {words}, from e = {min(found):.1e} for the"
                f" sharpest variant and dtype to {max(found):.1e} for the bluntest."
            )
    return None
