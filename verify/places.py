"""Places: where the suite leaves what it makes.  Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


def state_directory() -> Path:
    """Where runs leave their evidence: .verify in the current directory."""
    return Path(".verify")
