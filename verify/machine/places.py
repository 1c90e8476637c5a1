"""Places: the directories that the suite, or MPS for it, writes to.  Imports nothing heavy."""

from __future__ import annotations

import os
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


def mps_pipes() -> Path:
    """The directory of the pipes of NVIDIA's MPS; without MPS it need not be there."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
