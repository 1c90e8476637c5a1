"""`verify run` and `verify fuzz`: put kernels on trial."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from verify.cli import options
from verify.cli.options import console, existing
from verify.cli.summary import finish
from verify.engine import CLEAN, FAILED, Order, carry_out


@click.command()
@options.kernels
@options.examples
@options.profile
@options.seed
@options.workers
@options.run_id
@options.select
def run(kernels: tuple[Path, ...], workers: str, **chosen: Any) -> int:
    """Put KERNELS on trial (the collection under kernels/ if none is given): random problems before every oracle.

    A kernel file ends with VARIANT = Variant(...), or simply has a function attention(q, k, v, ...) that returns out or
    (out, lse).

    \b
    verify run my_kernel.py
    verify run --examples 200 -k bfloat16
    """
    files = existing(kernels)
    order = Order(kernels=files, workers=_few(workers, files), **chosen)
    return finish(order, carry_out(order, console))


@click.command()
@options.kernels
@click.option("--max-time", default=300.0, show_default=True, help="Seconds.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failing verdict.")
@options.workers
def fuzz(kernels: tuple[Path, ...], max_time: float, keep_going: bool, workers: str) -> int:
    """Search for a failing case until the time is over: rounds of fresh random problems, one evidence."""
    files = existing(kernels)
    deadline = time.monotonic() + max_time
    order = Order(kernels=files, examples=25, workers=_few(workers, files), profile="dev")
    first = int.from_bytes(order.run_id[-6:].encode(), "big")
    status, rounds = CLEAN, 0
    while time.monotonic() < deadline and (status == CLEAN or (keep_going and status == FAILED)):
        status = carry_out(replace(order, seed=first + rounds), console, deadline)
        rounds += 1
    console.print(f"{rounds} rounds, seeds from {first}")
    return finish(order, status)


def _few(workers: str, files: tuple[Path, ...]) -> str:
    return "2" if workers == "auto" and len(files) == 1 else workers
