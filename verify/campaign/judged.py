"""Which configs of a variant have passing verdicts of its present source on this device.

Recorded runs decide (.verify/runs); where none judged a config, the device's report does, local or
published.  Both say, too, which configs compile to the binaries of others on that device: these are
no configs of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verify import report as accuracy
from verify.evidence import Evidence, EvidenceError, load
from verify.evidence.known_failures import Xfails, xfails_for
from verify.machine.places import published_parent, report_parent, state_directory
from verify.report import Report, ReportError
from verify.report.resources import same_configs
from verify.variant import Config, Declaration, arch_of

Key = tuple[str, str, str]  # variant, config, dtype


@dataclass(frozen=True)
class Judged:
    """passing, failing: (variant, config, dtype); failing: with the id of a failing case.

    same: by variant and config, in words, the config whose binaries are its own on this device.
    """

    passing: frozenset[Key]
    failing: dict[Key, str]
    same: dict[tuple[str, str], str] = field(default_factory=dict)

    def refusal(self, declaration: Declaration, config: Config, dtype: str) -> str | None:
        """Why a config is not timed: it counts as not judged, or is another one; or None."""
        key = declaration.ref, config.name, dtype
        if key in self.failing:
            return f"fails: {self.failing[key]}"
        if key[:2] in self.same:
            return f"no config of its own: {self.same[key[:2]]}"
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
    for table in evidence.verdicts.tables:
        shape = table.shape
        if shape.variant in same and any(said.outcome == "pass" for said in shape.said):
            passing.add((shape.variant, shape.config, shape.dtype))
    for verdict in xfails.unexpected(evidence.verdicts):
        if verdict.variant in same:
            failing.setdefault((verdict.variant, verdict.config, verdict.dtype), verdict.case)
    arch = _arch(evidence.run.device) if evidence.runs else ""
    twins = {
        (ref, entry["config"]): _said(entry["other"], arch)
        for ref in same
        for entry in same_configs(b for b in evidence.builds if (b.variant, b.arch) == (ref, arch))
    }
    return Judged(frozenset(passing - failing.keys()), failing, twins)


def of_report(report: Report, sources: dict[str, str]) -> Judged:
    """The same of a report: a config passes if its variant and dtype were judged, with no coverage
    bin empty, and no failure of it is news."""
    passing: set[Key] = set()
    failing: dict[Key, str] = {}
    twins: dict[tuple[str, str], str] = {}
    arch = _arch(report["device"])
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
        twins |= {
            (ref, entry["config"]): _said(entry["other"], arch)
            for row in variant["builds"]
            if row["arch"] == arch
            for entry in row.get("same", ())
        }
    return Judged(frozenset(passing - failing.keys()), failing, twins)


def _arch(device: Mapping[str, Any]) -> str:
    """The name of the architecture that a device's builds are compiled for; "" if there is none."""
    major, _, minor = str(device.get("capability") or "").partition(".")
    return arch_of((int(major), int(minor))).target if major.isdigit() and minor.isdigit() else ""


def _said(other: str, arch: str) -> str:
    return f"{arch} gets the binary of {other}"


def _joined(one: Judged, other: Judged) -> Judged:
    """A failure is never replaced by a pass."""
    failing = one.failing | other.failing
    same = other.same | one.same
    return Judged((one.passing | other.passing) - failing.keys(), failing, same)


def _unknown(found: Judged, known: Judged) -> Judged:
    """What of `found` runs do not say already."""

    def fresh(keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if key not in known.passing and key not in known.failing}

    return Judged(
        frozenset(fresh(found.passing)),
        {key: found.failing[key] for key in fresh(found.failing)},
        found.same,
    )


def _report(folder: Path) -> Report | None:
    try:
        return accuracy.read(folder)
    except (ReportError, OSError):
        return None
