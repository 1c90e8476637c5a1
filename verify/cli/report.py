"""`verify report`, `verify compare` and `verify recheck`: make reports, and hold them against others and the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verify.cli import options
from verify.cli.options import UsageError, console
from verify.cli.summary import conclude, lacks
from verify.engine import CLEAN, FAILED, INFRASTRUCTURE, Order, carry_out, failing, say
from verify.evidence import EvidenceError, load
from verify.xfails import XfailsError


@click.command()
@click.option("--out", "directory", default=Path("reports"), type=click.Path(path_type=Path), show_default=True, help="Parent.")
@options.examples
@options.profile
@options.seed
@options.workers
@options.run_id
@click.option(
    "--run",
    "from_runs",
    multiple=True,
    metavar="NAME",
    help="Build it from the evidence of that run, or of several together, judging nothing; a directory of evidence will do.",
)
@click.option("--render", type=click.Path(path_type=Path), help="Write that folder's pages again, with what lies beside them.")
def report(directory: Path, from_runs: tuple[str, ...], render: Path | None, **chosen: Any) -> int:
    """Judge the collection on this machine and write its accuracy report to OUT/<device>/report.{json,md,html}."""
    if render is not None:
        return _render(render)
    if from_runs:
        return _report_of(from_runs, directory)
    from verify import device

    where = directory / device.slug()
    order = Order(report_dir=where, **chosen)
    return conclude(order, lambda: carry_out(order, console), where)


def _report_of(runs: tuple[str, ...], parent: Path) -> int:
    """Write the report of runs that were judged before, and say where it is; exits 1 if one failed, 3 if some are missing."""
    from verify.campaign import publish, remember_failures
    from verify.places import state_directory
    from verify.report import ReportError
    from verify.statistics.verdicts import findings

    places = []
    for name in runs:
        kept = state_directory() / "runs" / name
        place = next((path for path in (kept, Path(name)) if path.is_dir()), None)
        if place is None:
            raise UsageError(f"no run {name!r} under {kept.parent}, and no directory of that name")
        places.append(place)
    try:
        evidence = load(*places)
        if not evidence.verdicts:
            raise ReportError(f"nothing was judged in {', '.join(runs)}")
        evidence = evidence.with_verdicts(findings(evidence.verdicts))
        said = publish(evidence, ", ".join(runs), parent)
    except (EvidenceError, ReportError, XfailsError, OSError) as error:
        raise UsageError(str(error)) from None
    if state_directory().is_dir():
        remember_failures(evidence)
    console.print(said, highlight=False)
    if failing(evidence):
        return FAILED
    return INFRASTRUCTURE if lacks(parent / str(evidence.run.device["slug"])) else CLEAN


def _render(folder: Path) -> int:
    """Write the pages of a report again; exits 1 if it says that something fails."""
    from verify.report import ReportError, read, write

    try:
        paths = write(read(folder), folder)
        status = read(folder)["status"]
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    console.print(f"report: {paths[-1]}", highlight=False)
    return FAILED if status == "red" else CLEAN


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def compare(old: Path, new: Path) -> int:
    """Show what two reports (report.json, or its folder) differ in; exits 1 if anything is newly failing."""
    from verify.report import ReportError, read, render_comparison
    from verify.report import compare as comparison

    try:
        before, after = (read(path / "report.json" if path.is_dir() else path) for path in (old, new))
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    found = comparison(before, after)
    console.print(render_comparison(found), markup=False, highlight=False, soft_wrap=True)
    return FAILED if found.newly_failing else CLEAN


@click.command()
@click.argument("folder", default=Path("reports"), type=click.Path(path_type=Path))
def recheck(folder: Path) -> int:
    """Compute the worst cases of all reports in FOLDER again, reference and bound, without running any kernel.

    Of gradients the reference alone: their bounds depend on what the kernel's forward saved.
    """
    from verify.recheck import recheck as again
    from verify.report import ReportError

    try:
        found = again(folder)
    except ReportError as error:
        raise UsageError(str(error)) from None
    for one in found:
        console.print(f"{one.path}: {one.cases} worst cases computed again, {len(one.disagreeing)} disagree", highlight=False)
        for text in one.disagreeing:
            say(console, f"  {text}")
        for ref in one.stale:
            console.print(f"  stale: the source of {ref} has changed since", style="yellow", markup=False, highlight=False)
    if not found:
        console.print(f"no report under {folder}")
    return FAILED if any(one.disagreeing for one in found) else CLEAN
