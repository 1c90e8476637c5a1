"""What a report says of the runs that it is made of: device, versions, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from verify.evidence import Evidence, RunInfo
from verify.report.schema import LeftOut, ReportError, Started


def refuse_mixed(evidence: Evidence) -> None:
    """Raise ReportError for evidence without a run record, of several devices, or of two sources of
    a variant."""
    if not evidence.runs:
        raise ReportError(
            "the evidence has no run record: nothing says on what device it was measured"
        )
    devices = {str(run.device.get("slug")) for run in evidence.runs}
    if len(devices) > 1:
        raise ReportError(
            f"the evidence mixes devices: {', '.join(sorted(devices))}; a report is of one"
        )
    if evidence.changed:
        raise ReportError(
            f"the evidence judges more than one source of {', '.join(evidence.changed)}: report"
            " those runs apart, or judge the present sources in a new run"
        )


def several(words: Iterable[Any]) -> str:
    """Different words once each, the first one first; one that is given can be several already."""
    return ", ".join(dict.fromkeys(one for word in words for one in str(word).split(", ")))


def agreed(words: Sequence[Any]) -> Any:
    """The word that all say, or all of what they say differently."""
    return words[0] if all(word == words[0] for word in words) else several(words)


def device(runs: Sequence[RunInfo]) -> dict[str, Any]:
    """The first run's, with all of what the others say differently of a device of that name."""
    return {key: agreed([run.device.get(key) for run in runs]) for key in runs[0].device}


def versions(runs: Sequence[RunInfo]) -> dict[str, str]:
    """All that the runs were made under, the first one first."""
    names = sorted({name for run in runs for name in run.versions})
    return {name: several(run.versions.get(name, "unknown") for run in runs) for name in names}


def starts(runs: Sequence[RunInfo], ended: Iterable[str] = ()) -> list[Started]:
    """When each run first began, in order of time.  ended: as in `Evidence`."""
    first = {run.run: run for run in reversed(runs)}
    ordered = sorted(first.values(), key=lambda run: (run.started, run.run))
    early, found = set(ended), list[Started]()
    for run in ordered:
        one: Started = {"run": run.run, "started": run.started, "profile": run.profile}
        found.append({**one, "ended_early": True} if run.run in early else one)
    return found


def left_out(evidence: Evidence) -> list[LeftOut]:
    """What the runs recorded of older sources."""
    return [
        {"variant": one.variant, "run": one.run, "cases": one.cases, "failures": one.failures}
        for one in evidence.left_out
    ]
