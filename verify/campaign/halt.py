"""Halt: when a campaign begins no further case: its time is over, or the first failure was asked
for and found.

Every process of a campaign asks here before a case.  Imports nothing heavy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# when time is over, in seconds of time.monotonic(), which all processes of a machine share
UNTIL = "VERIFY_UNTIL"

_marker: Path | None = None


def stop_at_first_failure(marker: Path | None) -> None:
    """Have this process stop where `marker` is a file, and make it at its own first failure; None:
    go on to the end."""
    global _marker
    _marker = marker


def armed() -> bool:
    """Whether this campaign ends at its first failure."""
    return _marker is not None


def failed() -> None:
    """Say that something failed: all processes stop if that was asked for."""
    if _marker is not None and _marker.parent.is_dir():  # else no campaign has begun
        _marker.touch()


def stopped() -> bool:
    """Whether a process has failed in a campaign that ends at its first failure."""
    return _marker is not None and _marker.exists()


def out_of_time() -> bool:
    """Whether the deadline that this process was started with is past; never, where there is
    none."""
    return time.monotonic() > float(os.environ.get(UNTIL, "inf"))


def over() -> bool:
    """Whether no further case is to be begun."""
    return out_of_time() or stopped()
