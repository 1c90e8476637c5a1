"""A published report that grows: what it says of variants that a new campaign did not judge is
kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verify.report import pairs
from verify.report.build import overall
from verify.report.merged_runs import agreed, several
from verify.report.schema import DTypeReport, Report, ReportError, Started, VariantReport
from verify.report.statistics import fewer


def with_kept(new: Report, old: Report) -> Report:
    """The new report, and what an older one says of variants of which the new one judged no case
    and compiled no build.

    Both runs are listed then.  Raises ReportError for reports of two devices.
    """
    slugs = [str(report["device"].get("slug")) for report in (old, new)]
    if slugs[0] != slugs[1]:
        raise ReportError(f"a report of {slugs[1]} cannot keep what one of {slugs[0]} says")
    judged = {v["ref"] for v in new["variants"] if v["cases"] or any(map(_compiled, v["builds"]))}
    kept = {v["ref"]: _light(v) for v in old["variants"] if v["ref"] not in judged}
    if not kept:
        return new
    variants = {v["ref"]: v for v in new["variants"]} | kept
    listed = {run["run"]: run for run in (*_runs(old), *_runs(new))}
    runs = sorted(listed.values(), key=lambda run: (run["started"], run["run"]))
    whole: Report = {
        **new,
        "run": several(run["run"] for run in runs),
        "started": runs[0]["started"],
        "profile": several(run["profile"] for run in runs),
        "device": _joined(old["device"], new["device"]),
        "versions": _joined(old["versions"], new["versions"]),
        "reasons": [*dict.fromkeys((*new["reasons"], *old["reasons"]))],
        "variants": [variants[ref] for ref in sorted(variants)],
        "cases": sum(variant["cases"] for variant in variants.values()),
        "failures": sum(variant["failures"] for variant in variants.values()),
        "lost": [*new["lost"], *_of(kept, old["lost"])],
        "torn": [*new["torn"], *old["torn"]],
        "unstable": [
            *new["unstable"],
            *(one for one in old["unstable"] if one["case"].partition(":")[0] in kept),
        ],
        "not_run": [
            *(row for row in new["not_run"] if row["variant"] not in kept),
            *(row for row in old["not_run"] if row["variant"] not in judged),
        ],
        "pools": [*new.get("pools", []), *_of(kept, old.get("pools", []))],
        "accuracy": [*new.get("accuracy", []), *_of(kept, old.get("accuracy", []))],
        "power": [*new.get("power", []), *_of(kept, old.get("power", []))],
        "mutation": sorted(
            [*new.get("mutation", []), *_of(kept, old.get("mutation", []))],
            key=lambda one: one["variant"],
        ),
        "runs": runs,
    }
    told = [one["pairs"] for one in (old, new) if "pairs" in one]
    if told:
        whole["pairs"] = pairs.joined(*told)
    whole["not_run"].sort(key=lambda row: (row["variant"], row["dtype"], row["reason"]))
    if left := [*new.get("left_out", []), *_of(kept, old.get("left_out", []))]:
        whole["left_out"] = sorted(left, key=lambda one: (one["variant"], one["run"]))
    if ended := [*new.get("interrupted", []), *_of(kept, old.get("interrupted", []))]:
        whole["interrupted"] = ended
    whole["status"] = overall(whole)
    return whole


def _light(variant: VariantReport) -> VariantReport:
    """With as many points for the plots as a new report has."""
    dtypes: list[DTypeReport] = [
        {**dtype, "samples": {name: fewer(found) for name, found in dtype["samples"].items()}}
        for dtype in variant["dtypes"]
    ]
    return {**variant, "dtypes": dtypes}


def _compiled(builds: Mapping[str, Any]) -> bool:
    return bool(builds["compiled"])


def _of(kept: Mapping[str, object], rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row["variant"] in kept]


def _runs(report: Report) -> list[Started]:
    one: Started = {
        "run": report["run"],
        "started": report["started"],
        "profile": report["profile"],
    }
    return report.get("runs", [one])


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """All that two campaigns say of their device, or of the versions, the older first."""
    told = {name: agreed((old.get(name, word), word)) for name, word in new.items()}
    return told | {name: old[name] for name in old.keys() - new.keys()}
