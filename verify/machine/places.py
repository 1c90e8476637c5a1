"""Places: the directories that the suite writes to.  Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


def state_directory() -> Path:
    """The directory for the evidence of runs: .verify in the current directory."""
    return Path(".verify")


def report_parent(directory: Path | None, publish: bool) -> Path:
    """The parent of the folder that a report is written to first.

    It is `directory`, or .verify/report (not tracked by git) with --publish or without `directory`.
    """
    return state_directory() / "report" if publish or directory is None else directory


def published_parent(directory: Path | None) -> Path:
    """The parent of the folder that a report is published to."""
    return directory or Path("reports")
