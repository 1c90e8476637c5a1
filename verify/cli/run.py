"""`verify run` and `verify fuzz`: judge kernels."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from verify.campaign.runner import CLEAN, FAILED, RunRequest, execute
from verify.cli import options
from verify.cli.files import Files
from verify.cli.options import UsageError, console, existing
from verify.cli.summary import conclude


@click.command()
@options.kernels
@options.oracles_and_names
@options.only_dtypes
@options.with_files
@options.examples
@options.time
@options.profile
@options.seed
@options.workers
@options.run_id
@options.select
@options.shard
@options.all_configs
@options.exit_first
@options.strict
@options.exports
def run(
    kernels: tuple[Path, ...],
    oracles: tuple[str | Path, ...],
    seconds: float | None,
    strict: bool,
    junit: Path | None,
    sarif: Path | None,
    summary: Path | None,
    **choices: Any,
) -> int:
    """Judge KERNELS (by default the collection under kernels/) on random problems with every
    oracle.

    A kernel file ends with VARIANT = Variant(...), or simply has a function attention(q, k, v, ...)
    that returns out or (out, lse).  What [tool.verify] in pyproject.toml says holds where no option
    does.

    \b
    verify run my_kernel.py
    verify run my_kernel.py -x
    verify run my_kernel.py --dtype bfloat16 --oracle bound --examples 200
    verify run my_kernel.py --junit verdicts.xml --summary "$GITHUB_STEP_SUMMARY"
    """
    names = tuple(each for each in oracles if isinstance(each, str))
    request = RunRequest(
        kernels=existing(kernels),
        oracles=tuple(each for each in oracles if isinstance(each, Path)),
        only_oracles=names,
        **choices,
    )
    deadline = None if seconds is None else time.monotonic() + seconds
    return conclude(
        request,
        lambda: execute(request, console, deadline),
        complete=not (seconds or names or request.only_dtypes or request.shard),
        strict=strict,
        files=Files(junit, sarif, summary),
    )


@click.command()
@options.kernels
@options.oracles
@options.with_files
@click.option(
    "--max-time", default=300.0, show_default=True, callback=options.above_zero, help="Seconds."
)
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failing verdict.")
@options.workers
@options.run_id
@options.exit_first
def fuzz(
    kernels: tuple[Path, ...], max_time: float, keep_going: bool, exit_first: bool, **choices: Any
) -> int:
    """Search for a failing case until the time is over, in rounds of new random problems.

    A round in which a verdict fails is the last one; with -x it ends at that verdict. Exit code 0
    means that no verdict failed, even if the rounds covered less than a complete campaign. All
    rounds share one evidence.
    """
    if keep_going and exit_first:
        raise UsageError("--keep-going and --exitfirst: give only one of them")
    deadline = time.monotonic() + max_time
    request = RunRequest(
        kernels=existing(kernels), examples=25, profile="dev", exit_first=exit_first, **choices
    )
    first = int.from_bytes(request.run_id[-6:].encode(), "big")

    def search() -> int:
        status, rounds = CLEAN, 0
        while time.monotonic() < deadline and (
            status == CLEAN or (keep_going and status == FAILED)
        ):
            status = execute(replace(request, seed=first + rounds), console, deadline)
            rounds += 1
        console.print(f"rounds: {rounds}; the seed of the first: {first}")
        return status

    return conclude(request, search, complete=False)
