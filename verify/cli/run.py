"""`verify run` and `verify fuzz`: put kernels on trial."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from verify.campaign.runner import CLEAN, FAILED, RunRequest, execute
from verify.cli import options
from verify.cli.options import UsageError, console, existing
from verify.cli.summary import conclude


@click.command()
@options.kernels
@options.oracles
@options.examples
@options.profile
@options.seed
@options.workers
@options.run_id
@options.select
@options.exit_first
@options.strict
def run(kernels: tuple[Path, ...], strict: bool, **chosen: Any) -> int:
    """Put KERNELS on trial (the collection under kernels/ if none is given): random problems before
    every oracle.

    A kernel file ends with VARIANT = Variant(...), or simply has a function attention(q, k, v, ...)
    that returns out or (out, lse).

    \b
    verify run my_kernel.py
    verify run my_kernel.py -x
    verify run --examples 200 -k bfloat16
    """
    order = RunRequest(kernels=existing(kernels), **chosen)
    return conclude(order, lambda: execute(order, console), strict=strict)


@click.command()
@options.kernels
@options.oracles
@click.option(
    "--max-time", default=300.0, show_default=True, callback=options.above_zero, help="Seconds."
)
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failing verdict.")
@options.workers
@options.run_id
@options.exit_first
def fuzz(
    kernels: tuple[Path, ...], max_time: float, keep_going: bool, exit_first: bool, **chosen: Any
) -> int:
    """Search for a failing case until the time is over: rounds of fresh random problems, one
    evidence.

    A round in which a verdict fails is the last one; with -x it ends there.  Exit code 0: nothing
    was found, however little of what a whole campaign covers was tried.
    """
    if keep_going and exit_first:
        raise UsageError("--keep-going and --exitfirst: give one of them")
    deadline = time.monotonic() + max_time
    order = RunRequest(
        kernels=existing(kernels), examples=25, profile="dev", exit_first=exit_first, **chosen
    )
    first = int.from_bytes(order.run_id[-6:].encode(), "big")

    def search() -> int:
        status, rounds = CLEAN, 0
        while time.monotonic() < deadline and (
            status == CLEAN or (keep_going and status == FAILED)
        ):
            status = execute(replace(order, seed=first + rounds), console, deadline)
            rounds += 1
        console.print(f"{rounds} rounds, seeds from {first}")
        return status

    return conclude(order, search, whole=False)
