"""Halt: decides whether a campaign begins another case.

It does not if its time is over, if the user has ended it, if a case has failed and --exitfirst was
given, or if a GPU is quarantined.  Every process of a campaign asks before each case.  Imports
nothing heavy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# The deadline in seconds of time.monotonic(), which all processes of a machine share.
UNTIL = "VERIFY_UNTIL"

_marker: Path | None = None
_quarantine: Path | None = None
_interruption: Path | None = None


class SearchOver(BaseException):
    """A search for a failing case ends.  Hypothesis stops at it, where it would draw all further
    examples of a test that returned; the test has passed then."""


class ShrinkingOver(BaseException):
    """A failing case is made no smaller.  Hypothesis stops at it, where it would draw all further
    candidates of a test that returned; the test has failed.

    failure: of the smallest case.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


def stop_at_first_failure(marker: Path | None) -> None:
    """Make this process stop once `marker` is a file, and create that file at its first failure.

    None: judge all cases.
    """
    global _marker
    _marker = marker


def stop_at_quarantine(marker: Path | None) -> None:
    """Make this process stop once `marker` is a file."""
    global _quarantine
    _quarantine = marker


def stop_at_interruption(marker: Path | None) -> None:
    """Make this process stop once `marker` is a file: the user has ended the campaign."""
    global _interruption
    _interruption = marker


def armed() -> bool:
    """Whether this campaign ends at its first failure."""
    return _marker is not None


def failed() -> None:
    """Report a failure: all processes stop if --exitfirst was given."""
    if _marker is not None and _marker.parent.is_dir():  # otherwise no campaign has begun
        _marker.touch()


def stopped() -> str:
    """Why this campaign ends early: the user has ended it, a case has failed in one that ends at
    its first failure, or a GPU is quarantined; "" if it goes on."""
    if _interruption is not None and _interruption.exists():
        return "interrupted"
    if _marker is not None and _marker.exists():
        return "stopping at the first failure"
    if _quarantine is not None and _quarantine.exists():
        return "a GPU is quarantined"
    return ""


def limited() -> bool:
    """Whether the campaign has a deadline."""
    return UNTIL in os.environ


def out_of_time() -> bool:
    """Whether the campaign's deadline has passed; False if there is none."""
    return time.monotonic() > float(os.environ.get(UNTIL, "inf"))


def over() -> bool:
    """Whether this process must not begin another case."""
    return out_of_time() or stopped() != ""
