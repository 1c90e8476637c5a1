"""Which configs of a variant have passing verdicts of its present source on this device.

Recorded runs decide (.verify/runs); where none judged a config, the device's report does, local or
published.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify import report as accuracy
from verify.evidence import Evidence, EvidenceError, load
from verify.evidence.known_failures import Xfails, xfails_for
from verify.machine.places import published_parent, report_parent, state_directory
from verify.report import Report, ReportError
from verify.variant import Config, Declaration

Key = tuple[str, str, str]  # variant, config, dtype


@dataclass(frozen=True)
class Judged:
    """passing, failing: (variant, config, dtype); failing: with the id of a failing case."""

    passing: frozenset[Key]
    failing: dict[Key, str]

    def refusal(self, declaration: Declaration, config: Config, dtype: str) -> str | None:
        """Why a config counts as not judged, or None."""
        key = declaration.ref, config.name, dtype
        if key in self.failing:
            return f"fails: {self.failing[key]}"
        return None if key in self.passing else "not judged: no passing verdict of this source"


def judged(declarations: Sequence[Declaration], device: dict[str, Any]) -> Judged:
    """What is on record of these variants on that device (a fingerprint)."""
    sources = {declaration.ref: declaration.source_hash for declaration in declarations}
    xfails = xfails_for(device)
    found = Judged(frozenset(), {})
    for folder in sorted((state_directory() / "runs").glob("*")):
        try:
            evidence = load(folder)
        except (EvidenceError, OSError):
            continue
        if evidence.runs and evidence.run.device.get("slug") == device["slug"]:
            found = _joined(found, of_evidence(evidence, sources, xfails))
    for parent in (report_parent(None, publish=False), published_parent(None)):
        report = _report(parent / str(device["slug"]))
        if report is not None and report["device"].get("slug") == device["slug"]:
            found = _joined(found, _unknown(of_report(report, sources), found))
    return found


def of_evidence(evidence: Evidence, sources: dict[str, str], xfails: Xfails) -> Judged:
    """What a run says of the variants whose source it judged.  A known defect does not count as a
    failure."""
    same = {
        entry.ref
        for entry in evidence.variants
        if sources.get(entry.ref) == entry.source_hash and entry.ref not in evidence.changed
    }
    passing: set[Key] = set()
    failing: dict[Key, str] = {}
    for verdict in evidence.verdicts:
        if verdict.variant not in same:
            continue
        key = verdict.variant, verdict.config, verdict.dtype
        if verdict.outcome == "pass":
            passing.add(key)
        elif verdict.outcome == "fail" and xfails.expecting(verdict) is None:
            failing.setdefault(key, verdict.case)
    return Judged(frozenset(passing - failing.keys()), failing)


def of_report(report: Report, sources: dict[str, str]) -> Judged:
    """The same of a report: a config passes if its variant and dtype were judged, with no coverage
    bin empty, and no failure of it is news."""
    passing: set[Key] = set()
    failing: dict[Key, str] = {}
    for variant in report["variants"]:
        ref = variant["ref"]
        if sources.get(ref) != variant["source_hash"]:
            continue
        for failure in variant["failing"]:
            if "known" not in failure:  # of one oracle, the smallest of all dtypes alone is there
                failing |= {
                    (ref, failure["config"], dtype["dtype"]): failure["case"]
                    for dtype in variant["dtypes"]
                }
        passing |= {
            (ref, config, dtype["dtype"])
            for dtype in variant["dtypes"]
            if dtype["cases"] and not dtype["bins_missing"]
            for config in variant["configs"]
        }
    return Judged(frozenset(passing - failing.keys()), failing)


def _joined(one: Judged, other: Judged) -> Judged:
    """A failure is never replaced by a pass."""
    failing = one.failing | other.failing
    return Judged((one.passing | other.passing) - failing.keys(), failing)


def _unknown(found: Judged, known: Judged) -> Judged:
    """What of `found` runs do not say already."""

    def fresh(keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if key not in known.passing and key not in known.failing}

    return Judged(
        frozenset(fresh(found.passing)),
        {key: found.failing[key] for key in fresh(found.failing)},
    )


def _report(folder: Path) -> Report | None:
    try:
        return accuracy.read(folder)
    except (ReportError, OSError):
        return None
