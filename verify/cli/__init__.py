"""The command line: run, fuzz, campaign, replay, report, compare, recheck, list, bench, sanitize,
probe, profile, oracles, setup, test.

Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is
incomplete.  docs/command-line.md describes them, the commands and the environment variables.  A
module that takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import inspect
from typing import Any

import click

from verify import __version__
from verify.campaign.runner import (
    CLEAN,
    INFRASTRUCTURE,
    NO_SPACE,
    USAGE,
    Interrupted,
    RunnerError,
    say,
)
from verify.cli import bench, campaign, replay, report, run, setup, tools
from verify.cli.options import UsageError, console
from verify.evidence.known_failures import XfailsError
from verify.machine import defaults, settings
from verify.machine.extras import MissingPackageError

__all__ = ["USAGE", "UsageError", "app", "console", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="verify")
def app() -> None:
    """Decides whether an attention kernel is right, and shows why.

    Start with `verify report` (judge the collection and write a report), `verify run my_kernel.py`
    (judge your kernel) or `verify list` (list the kernels).

    Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is
    incomplete.
    """
    try:
        settings.check()
    except settings.SettingError as error:
        raise UsageError(str(error)) from None
    context = click.get_current_context()
    if context.invoked_subcommand == "run":
        context.default_map = {"run": _defaults()}


def _defaults() -> dict[str, Any]:
    """The parameters of `verify run` that pyproject.toml gives.  Raises UsageError."""
    try:
        found = defaults.defaults()
    except defaults.DefaultsError as error:
        raise UsageError(str(error)) from None
    given = {
        "examples": found.examples,
        "seconds": found.time,
        "profile": found.profile,
        "seed": found.seed,
        "workers": found.workers,
        "strict": found.strict,
        "kernels": found.kernels or None,
    }
    return {name: value for name, value in given.items() if value is not None}


for _command in (
    run.run,
    run.fuzz,
    campaign.campaign,
    replay.replay,
    report.report,
    report.compare,
    tools.list_variants,
    report.recheck,
    report.witness,
    bench.bench,
    tools.sanitize,
    tools.test,
    tools.probe,
    tools.profile,
    tools.oracles,
    setup.setup,
):
    app.add_command(_command)


_names = ", ".join(setting.name for setting in settings.SETTINGS)
_purpose = inspect.cleandoc(app.help or "")
app.help = f"{_purpose}\n\nEnvironment: {_names}; see docs/command-line.md."


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        result = app(prog_name="verify", standalone_mode=False)
    except click.ClickException as error:
        say(console, f"verify: {error.format_message()}")
        return USAGE
    except XfailsError as error:
        say(console, f"verify: {error}")
        return USAGE
    except RunnerError as error:
        say(console, f"verify: {error}")
        return error.status
    except MissingPackageError as error:
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    except (click.exceptions.Abort, Interrupted, KeyboardInterrupt):
        say(console, "verify: interrupted")
        return INFRASTRUCTURE
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    return result if isinstance(result, int) else CLEAN
