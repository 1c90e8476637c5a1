"""Places: where the suite leaves what it makes.  Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


def state_directory() -> Path:
    """Where runs leave their evidence: .verify in the current directory."""
    return Path(".verify")


def report_parent(chosen: Path | None, publish: bool) -> Path:
    """Parent of the folder that a report is written to first: not among tracked files, unless
    `chosen` is."""
    return state_directory() / "report" if publish or chosen is None else chosen


def published_parent(chosen: Path | None) -> Path:
    """Parent of the folder that a report is published to."""
    return chosen or Path("reports")
