"""Commands that judge a case of a report again; a report holds those that its case's id does not
say."""

from __future__ import annotations

import shlex

from verify.problem.case import replay_command
from verify.report.campaign_schema import PowerReport
from verify.report.schema import WorstCase


def usual(case: str) -> str:
    """The command for a case that needs nothing but its id."""
    return f"python -m verify replay {shlex.quote(case)}"


def unusual(case: str) -> str | None:
    """The command for a case that needs files of kinds too; None for any other."""
    command = replay_command(case)
    return None if command == usual(case) else command


def command(entry: WorstCase | PowerReport) -> str:
    """The command for the case of an entry."""
    return entry.get("replay", usual(entry["case"]))
