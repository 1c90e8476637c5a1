"""What commands share: options, arguments, usage errors and the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from verify.engine import USAGE
from verify.evidence import is_plain, new_run_id

console = Console(width=None if sys.stdout.isatty() else 140)  # a log file needs no narrow table


class UsageError(click.ClickException):
    """Something that the caller has to say differently."""

    exit_code = USAGE


def _run_named(name: str | None) -> str:
    if name is None:
        return new_run_id()
    if not is_plain(name):
        raise UsageError(f"run-id: {name!r} is not a plain name")
    return name


kernels = click.argument("kernels", nargs=-1, type=click.Path(path_type=Path))
examples = click.option("--examples", type=int, help="Problems per variant, config, dtype and group of oracles.")
workers = click.option("--workers", "-n", default="auto", show_default=True, help="Processes: auto, or a number; 0 for none.")
profile = click.option(
    "--profile",
    type=click.Choice(["dev", "ci", "gpu", "nightly"]),
    help="How many cases, how random; default: what suits here.",
)
select = click.option("-k", "select", default="", metavar="EXPRESSION", help="Only dockets whose id matches, as pytest -k.")
seed = click.option("--seed", type=int, help="Seed of the random search.")
run_id = click.option(
    "--run-id", callback=lambda _, __, name: _run_named(name), help="Name the run, or go on with the one so named."
)


def existing(kernels: tuple[Path, ...]) -> tuple[Path, ...]:
    """The kernel files, all of which exist.  Raises UsageError."""
    for path in kernels:
        if not path.is_file():
            raise UsageError(f"no such kernel file: {path}")
    return kernels
