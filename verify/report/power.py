"""Certificates of power: the smallest strength of each class of faults, and the case that says it
(docs/power.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from verify.evidence import Verdict
from verify.report import replays
from verify.report.campaign_schema import PowerReport
from verify.report.schema import Report

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
}
"""Classes of faults, in the order of every table, and what e is in each."""


def reports(verdicts: Iterable[Verdict]) -> list[PowerReport]:
    """One entry per (variant, dtype, class) that a counted, passing case certifies, in this order.

    Of equal strengths the case with the first name counts.  Evidence of an earlier day has none.
    """
    found: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.counted and verdict.outcome == "pass":
            for name in verdict.measures:
                fault = name.removeprefix(_PREFIX)
                if fault != name and fault in FAULTS:
                    found[verdict.variant, verdict.dtype, fault].append(verdict)
    order = list(FAULTS)
    keys = sorted(found, key=lambda key: (*key[:2], order.index(key[2])))
    return [_report(*key, found[key]) for key in keys]


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
                f"Smallest fault that would have failed, {words}: e = {min(found):.1e} to"
                f" {max(found):.1e}."
            )
    return None
