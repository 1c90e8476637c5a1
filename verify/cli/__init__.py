"""The command line: run, fuzz, replay, report, compare, recheck, list, bench, sanitize, probe, oracles, test.

Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is incomplete.
"""

from __future__ import annotations

import click

from verify import __version__
from verify.applicability import list_oracles
from verify.cli import replay, report, run, tools
from verify.cli.options import UsageError, console
from verify.cli.summary import summary
from verify.engine import CLEAN, INFRASTRUCTURE, USAGE, say
from verify.probes.command import probe

__all__ = ["USAGE", "UsageError", "app", "console", "main", "summary"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="verify")
def app() -> None:
    """Decides whether an attention kernel is right, and shows why.

    Start with `verify report` (an accuracy report of this machine), `verify run my_kernel.py` (your own kernel on trial) or
    `verify list` (who is on trial here).

    Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is incomplete.
    """


for _command in (
    run.run,
    run.fuzz,
    replay.replay,
    report.report,
    report.compare,
    tools.list_variants,
    report.recheck,
    tools.bench,
    tools.sanitize,
    tools.test,
    probe,
    list_oracles,
):
    app.add_command(_command)


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        result = app(prog_name="verify", standalone_mode=False)
    except click.exceptions.Abort:
        return INFRASTRUCTURE
    except click.ClickException as error:
        say(console, f"verify: {error.format_message()}")
        return USAGE
    return result if isinstance(result, int) else CLEAN
