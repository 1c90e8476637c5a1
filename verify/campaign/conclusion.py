"""The end of a run: its statistics are judged, its failures remembered and its report written."""

from __future__ import annotations

from pathlib import Path

from verify.campaign.run import FAILURES, CampaignRun
from verify.evidence import Evidence, Recorder
from verify.evidence.known_failures import FILE, at_start, changed_since, digest, xfails_in
from verify.machine.places import state_directory
from verify.report import build, write
from verify.statistics.verdicts import GROUP, findings


def campaign_fails(run: CampaignRun) -> bool:
    """Whether the campaign's statistics fail and no known defect explains it.  All cases can pass
    nevertheless."""
    evidence = run.evidence()
    return bool(evidence.verdicts) and any(
        verdict.group == GROUP for verdict in xfails_in(evidence).unexpected(evidence.verdicts)
    )


def write_report(run: CampaignRun, directory: str | Path | None = None) -> str:
    """Judge a run's statistics and `publish` the run; returns "" if nothing was judged."""
    evidence = run.evidence()
    if not evidence.verdicts:
        return ""
    failing = findings(evidence.verdicts)
    if failing:  # they stay on record if the run continues
        with Recorder(run.directory, GROUP) as recorder:
            for verdict in failing:
                recorder.write(verdict)
    evidence = evidence.with_verdicts(failing)
    remember_failures(evidence)
    return publish(evidence, run.directory.name, state_directory() / "report", directory)


def remember_failures(evidence: Evidence) -> None:
    """Store the ids of the smallest failing cases; the next run asks them first."""
    failing = {v.case for v in evidence.verdicts.failing if v.group not in ("loading", GROUP)}
    if not failing:
        return
    path = state_directory() / FAILURES
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    smallest = sorted(failing, key=len)[:50]
    path.write_text("\n".join(dict.fromkeys([*smallest, *before][:200])) + "\n", encoding="utf-8")


def publish(
    evidence: Evidence, runs: str, parent: Path, directory: str | Path | None = None
) -> str:
    """Write the accuracy report of evidence; returns one line with its path and its result.

    directory: where to write it; by default the folder of the device in `parent`.  runs: the name
    of the evidence.
    """
    built = build(evidence, xfails=xfails_in(evidence))
    paths = write(built, directory or parent / str(built["device"]["slug"]))
    line = f"{built['cases']} cases, {built['failures']} failing; run {runs}; report: {paths[-1]}"
    return f"{line}{_other_xfails(evidence)}"


def _other_xfails(evidence: Evidence) -> str:
    """A warning if the known defects have changed since the evidence was recorded, or since this
    command began; else ""."""
    before = {run.versions["xfails"] for run in evidence.runs if "xfails" in run.versions}
    if before - {digest(at_start())}:
        return f"\n{FILE} is not the one that the run began with"
    return (
        f"\n{FILE} has changed while this command ran, and counts from the next one on"
        if changed_since()
        else ""
    )
