"""`verify sanitize --render`: writes the account of an earlier run, and its pages, again."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from verify.campaign.runner import CLEAN, USAGE, say
from verify.sanitizers import counts, report


def render_again(file: Path, earlier: tuple[Path, ...], folder: Path, console: Console) -> int:
    """Write the account in a file, with what earlier ones add, into a folder; returns an exit
    code."""
    try:
        (account,) = counts.read([file])
        paths = report.write_account(counts.together(account, counts.read(earlier)), folder)
    except ValueError as error:
        say(console, f"verify: {error}")
        return USAGE
    console.print(f"run {account['run']}; report: {paths[-1]}", highlight=False)
    return CLEAN
