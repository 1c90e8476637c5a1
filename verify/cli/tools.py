"""Commands beside the trial itself: `verify list`, `oracles`, `bench`, `probe`, `sanitize` and
`test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from verify.bundle import INSTALLED, ROOT
from verify.campaign.runner import CLEAN, FAILED, say
from verify.cli import options
from verify.cli.options import UsageError, console, existing
from verify.machine.places import published_parent, report_parent

_TOOLS = ("memcheck", "racecheck")


@click.command(name="list")
@options.kernels
def list_variants(kernels: tuple[Path, ...]) -> int:
    """List the variants, what they support, and whether they can run here."""
    files = existing(kernels)
    from rich.table import Table

    from verify.campaign.targets import excludes_here
    from verify.cell.discovery import roster

    found = roster(list(files) or None)
    if files and found.unusable:
        raise UsageError(found.unusable)
    table = Table("variant", "family", "dtypes", "head dims", "masks", "configs", "here")
    for declaration in found.declarations:
        support = declaration.support
        dims = f"{min(support.head_dims)}..{max(support.head_dims)}"
        names = ", ".join(config.name for config in declaration.configs)
        reason = excludes_here(declaration) or "yes"
        masks = ", ".join(support.masks) + (" and intersections" if support.intersections else "")
        table.add_row(
            declaration.ref,
            declaration.family,
            ", ".join(support.dtypes),
            dims,
            masks,
            names,
            reason,
        )
    console.print(table)
    for failure in found.failures:
        say(console, f"{failure.ref} does not load: {failure.message}")
    return FAILED if found.failures else CLEAN


@click.command()
@click.option(
    "--table",
    "write",
    is_flag=True,
    help=(
        "Write docs/applicability.md (which oracle judges which variant) and docs/oracles.md (what"
        " each oracle asks, and why)."
    ),
)
def oracles(write: bool) -> int:
    """List the oracles: what each catches, and in which group it sits."""
    from verify.campaign.applicability import list_oracles

    return list_oracles(write)


@click.command()
@click.option(
    "--seconds",
    default=180.0,
    show_default=True,
    callback=options.above_zero,
    help="The most that judging cases may take.",
)
@options.workers
@options.select
def bench(seconds: float, workers: str, select: str) -> int:
    """Measure this suite itself: builds, judged cases per second with their breakdown, and the fp64
    reference's rate."""
    from verify.cli.bench import bench as measure

    return measure(console, seconds, workers, select)


@click.command()
@click.argument("kernels", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path),
    help="Parent of the report's folder; default: .verify/report, with --publish: reports.",
)
@click.option("--publish", is_flag=True, help="Write it to reports/<device>/ too.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report as JSON in place of tables."
)
def probe(kernels: tuple[Path, ...], directory: Path | None, publish: bool, as_json: bool) -> int:
    """Measure the device: matrix units, approximations, and the order in which KERNELS (the
    collection if none) add P V.

    Writes .verify/report/<device>/probes.{json,md}; --publish writes them to reports/<device>/ too.
    Exits 1 if anything disagrees with the tables that bounds rely on.
    """
    from verify.cli.probe import Request
    from verify.cli.probe import probe as measure
    from verify.machine import device

    if publish and kernels:
        raise UsageError("--publish: publishes the probes of the collection, so name no KERNELS")
    folder = report_parent(directory, publish) / device.slug()
    published = published_parent(directory) / device.slug() if publish else None
    return measure(Request(kernels, folder, published), as_json)


@click.command()
@options.kernels
@click.option(
    "--tool", "tools", multiple=True, type=click.Choice(_TOOLS), default=_TOOLS, show_default=True
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    help="Only this one; a library's kernel too.",
)
@click.option("--case", metavar="ID", help="Only this case, which a failing verdict prints.")
@click.option(
    "--quick", is_flag=True, help="One config and dtype of each variant, at most four problems."
)
@click.option(
    "--report-dir",
    type=click.Path(path_type=Path),
    help="Where sanitizer.json and sanitizer.md go as well.",
)
@options.workers
def sanitize(
    kernels: tuple[Path, ...],
    tools: tuple[str, ...],
    variants: tuple[str, ...],
    case: str | None,
    quick: bool,
    report_dir: Path | None,
    workers: str,
) -> int:
    """Run KERNELS (the collection if none is given) under compute-sanitizer, planted faults before
    them."""
    files = existing(kernels)
    options.case_shaped(case)
    from verify.cli.sanitize import Request
    from verify.cli.sanitize import sanitize as again
    from verify.problem.case import Case

    try:
        parsed = Case.parse(case) if case is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    request = Request(
        kernels=files,
        tools=tools,
        variants=variants,
        case=parsed,
        quick=quick,
        workers=workers,
        report_dir=report_dir,
    )
    return again(request, console)


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> int:
    """Run the whole test suite (pytest -n auto); further arguments go to pytest."""
    if INSTALLED:
        raise UsageError(
            "test: an installed wheel holds no test suite; run this command in a checkout or an"
            " unpacked sdist"
        )
    words = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *arguments]
    return subprocess.run(words, cwd=ROOT, check=False).returncode
