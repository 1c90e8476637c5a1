"""Certificates of power: the smallest strength of each class of faults, and the case that says it
(docs/power.md)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from verify.evidence import Verdict
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


def reports(verdicts: Sequence[Verdict]) -> list[PowerReport]:
    """One entry per (variant, dtype, class) that a counted, passing case certifies, or the
    statistics of all, in this order.

    Of equal strengths the case with the first name counts.  Evidence of an earlier day has none.
    """
    found: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    pooled = pools(verdicts)
    for verdict in verdicts:
        if verdict.counted and verdict.outcome == "pass":
            for name in verdict.measures:
                fault = name.removeprefix(_PREFIX)
                if fault != name and fault in FAULTS:
                    found[verdict.variant, verdict.dtype, fault].append(verdict)
    order = list(FAULTS)
    reported = [_report(*key, found[key]) for key in found] + list(_of_pools(pooled))
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


def _report(variant: str, dtype: str, fault: str, verdicts: list[Verdict]) -> PowerReport:
    measure = f"{_PREFIX}{fault}"
    best = min(verdicts, key=lambda v: (v.measures[measure], v.case))
    rules = {
        rule: min(
            (v.measures[f"{rule}_{fault}"] for v in verdicts if f"{rule}_{fault}" in v.measures),
            default=None,
        )
        for rule in ("tutorial", "close")
    }
    found: PowerReport = {
        "variant": variant,
        "dtype": dtype,
        "fault": fault,
        "cases": len(verdicts),
        "strength": best.measures[measure],
        "case": best.case,
        "tutorial": rules["tutorial"],
        "close": rules["close"],
    }
    if replay := replays.unusual(best.case):
        found["replay"] = replay
    return found


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
