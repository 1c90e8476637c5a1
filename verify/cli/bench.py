"""The commands `verify bench kernels`, `verify bench suite` and `verify bench mutants`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from verify.cli import options
from verify.cli.options import UsageError, console, existing
from verify.machine.places import published_parent, report_parent

_SUITES = ("quick", "cpu", "shapes", "protocol", "batched", "all")
_MASKS = ("full", "causal")
_DIRECTIONS = ("forward", "backward")


@click.group()
def bench() -> None:
    """Measure speed: of the kernels that passed (`kernels`), of this suite (`suite`), or of its
    convictions (`mutants`)."""


@bench.command()
@click.option(
    "--seconds",
    default=180.0,
    show_default=True,
    callback=options.above_zero,
    help="The longest time for judging cases.",
)
@options.workers
@options.select
def suite(seconds: float, workers: str, select: str) -> int:
    """Measure this suite itself: builds, judged cases per second with the time of their steps, the
    fp64 reference's rate, and what bounds and a long sequence cost."""
    from verify.cli.bench_suite import bench_suite

    return bench_suite(console, seconds, workers, select)


@bench.command()
@click.option(
    "--seconds",
    default=120.0,
    show_default=True,
    callback=options.above_zero,
    help="The longest time, half of it for each language; a mutant that has begun is judged.",
)
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path),
    help="Parent of the report's folder; default: .verify/report.",
)
def mutants(seconds: float, directory: Path | None) -> int:
    """Judge a fixed sample of mutants of the shipped kernels again, without a GPU, and say how many
    are killed a minute.

    Writes .verify/report/<device>/mutants.json. Exits 1 if a mutant is no longer convicted, 3 if
    none was judged.
    """
    from verify.cli.bench_mutants import bench_mutants
    from verify.machine import device

    return bench_mutants(console, seconds, report_parent(directory, False) / device.slug())


@bench.command()
@options.kernels
@options.select
@click.option(
    "--suite",
    "named",
    type=click.Choice(_SUITES),
    help="The workloads (docs/benchmarks.md); default: quick with a GPU, else cpu.",
)
@click.option(
    "--shapes",
    multiple=True,
    metavar="B,H,N,D",
    help="These shapes in place of a suite: batch, heads, length, head dim.",
)
@click.option(
    "--mask",
    "masks",
    multiple=True,
    type=click.Choice(_MASKS),
    default=_MASKS,
    show_default=True,
    help="Only workloads of this mask.",
)
@click.option(
    "--direction",
    "directions",
    multiple=True,
    type=click.Choice(_DIRECTIONS),
    default=_DIRECTIONS,
    show_default=True,
    help="Only workloads of this direction.",
)
@click.option("--dtype", help="Of the inputs; default: float16, or what the variant has.")
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Timed calls of a row, after a quarter as many; fewer where one is long.",
)
@click.option(
    "--seconds",
    "total",
    type=float,
    callback=options.above_zero_or_none,
    help="The longest time for all rows; default: the suite's.",
)
@click.option(
    "--best",
    "only_best",
    is_flag=True,
    help="Of each variant and workload only the fastest config, as short trials find it.",
)
@click.option(
    "--continue",
    "resume",
    is_flag=True,
    help="Keep the rows that the last bench.json timed of the same sources; time the others.",
)
@click.option(
    "--lock-clocks",
    "lock_mhz",
    type=click.IntRange(min=1),
    metavar="MHZ",
    help="Lock the SM clock, and release it at the end; needs the right to.",
)
@options.out
@options.publish
def kernels(
    kernels: tuple[Path, ...],
    named: str | None,
    shapes: tuple[str, ...],
    masks: tuple[str, ...],
    directions: tuple[str, ...],
    directory: Path | None,
    publish: bool,
    select: str,
    **choices: Any,
) -> int:
    """Time KERNELS (by default the collection): every config with passing verdicts of the same
    source on this device, beside torch's.

    Writes .verify/report/<device>/bench.{json,md,svg}; --publish also writes them to
    reports/<device>/. Exits 1 if a kernel fails or its values differ from those of the others.
    """
    files = existing(kernels)
    if publish and (files or select):
        raise UsageError("--publish: publishes the whole collection; name no KERNELS and no -k")
    from verify.cell.discovery import environment
    from verify.cli.bench_kernels import bench_kernels
    from verify.cli.bench_selection import Request
    from verify.machine import device
    from verify.timing.workloads import SUITES, Suite, of_shapes, parse_shape

    named = named or ("quick" if environment().device == "cuda" else "cpu")
    whole = SUITES[named]
    if shapes:
        try:
            whole, named = Suite(of_shapes([parse_shape(one) for one in shapes])), "shapes given"
        except ValueError as error:
            raise UsageError(f"--shapes: {error}") from None
    workloads = tuple(
        one for one in whole.workloads if one.mask in masks and one.direction in directions
    )
    if not workloads:
        raise UsageError(f"--mask, --direction: nothing of the suite {named} is left")
    slug = device.slug()
    return bench_kernels(
        Request(
            kernels=files,
            suite=replace(whole, workloads=workloads),
            named=named,
            folder=report_parent(directory, publish) / slug,
            published=published_parent(directory) / slug if publish else None,
            expression=select,
            **choices,
        ),
        console,
    )
