"""`verify report`, `verify compare` and `verify recheck`: make reports, and hold them against
others and the judge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from verify.campaign.runner import CLEAN, FAILED, USAGE, RunRequest, execute, say
from verify.cli import options
from verify.cli.options import UsageError, console
from verify.cli.summary import conclude, objections, report_of, status_of
from verify.evidence import EvidenceError, load
from verify.evidence.known_failures import XfailsError
from verify.machine.places import published_parent, report_parent, state_directory


@dataclass(frozen=True)
class _Place:
    """Where reports go.  directory: the parent that was named, or None; publish, replace: as the
    options say."""

    directory: Path | None
    publish: bool
    replace: bool

    @property
    def parent(self) -> Path:
        """Where a report is written first."""
        return report_parent(self.directory, self.publish)

    def published(self, folder: Path, status: int) -> int:
        """Publish the report in a folder if that was asked for; the exit code, which is USAGE if it
        is refused."""
        from verify.report import read, write_index
        from verify.report.publishing import LossError, publish

        if not self.publish:
            return status
        target = published_parent(self.directory) / folder.name
        try:
            page, lost = publish(read(folder), target, replace=self.replace)
            write_index(target.parent)
        except OSError as error:
            raise UsageError(f"{target}: {error.strerror or error}") from None
        except LossError as error:
            say(
                console,
                f"verify: {error}; --replace publishes it all the same. What would be lost:",
            )
            for line in error.losses:
                say(console, f"  {line}")
            return USAGE
        if lost:
            say(console, f"{target} covered more, and was replaced. What is lost:")
            for line in lost:
                say(console, f"  {line}")
        console.print(f"published: {page}", highlight=False)
        return status


@click.command()
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path),
    help="Parent of the report's folder; default: .verify/report, with --publish: reports.",
)
@click.option(
    "--publish",
    is_flag=True,
    help="Write it to reports/<device>/ too, if it covers what lies there.",
)
@click.option(
    "--replace", is_flag=True, help="Publish it although it covers less than what lies there."
)
@options.examples
@options.profile
@options.seed
@options.workers
@options.run_id
@options.strict
@click.option(
    "--run",
    "from_runs",
    multiple=True,
    metavar="NAME",
    help=(
        "Build it from the evidence of that run, or of several together, judging nothing; a"
        " directory of evidence will do."
    ),
)
@click.option(
    "--render",
    type=click.Path(path_type=Path),
    help="Write that folder's pages again, with what lies beside them.",
)
def report(
    directory: Path | None,
    publish: bool,
    replace: bool,
    from_runs: tuple[str, ...],
    render: Path | None,
    strict: bool,
    **chosen: Any,
) -> int:
    """Judge the collection on this machine and write its accuracy report.

    It is written to .verify/report/<device>/report.{json,md,html}. --publish writes it to
    reports/<device>/ too, where it replaces another one only if it covers at least as much:
    variants, dtypes, groups of oracles, coverage bins, cases.
    """
    if replace and not publish:
        raise UsageError("--replace: says how to --publish, and nothing without it")
    if render is not None and (publish or from_runs):
        raise UsageError(
            "--render: writes a folder's pages again; --run and --publish make another report"
        )
    if render is not None:
        return _render(render)
    place = _Place(directory, publish, replace)
    if from_runs:
        return _report_of(from_runs, place, strict)
    from verify.machine import device

    where = place.parent / device.slug()
    order = RunRequest(report_dir=where, **chosen)
    status = conclude(order, lambda: execute(order, console), where, strict=strict)
    return place.published(where, status) if report_of(where, order.run_id) is not None else status


def _report_of(runs: tuple[str, ...], place: _Place, strict: bool) -> int:
    """Write the report of runs that were judged before, and say where it is; the exit code says
    what it says."""
    from verify.campaign.run import publish, remember_failures
    from verify.report import ReportError, read
    from verify.report.terminal import headline, notes
    from verify.statistics.verdicts import findings

    places = []
    for name in runs:
        kept = state_directory() / "runs" / name
        found = next((path for path in (kept, Path(name)) if path.is_dir()), None)
        if found is None:
            raise UsageError(f"no run {name!r} under {kept.parent}, and no directory of that name")
        places.append(found)
    try:
        evidence = load(*places)
        if not evidence.verdicts:
            raise ReportError(f"nothing was judged in {', '.join(runs)}")
        evidence = evidence.with_verdicts(findings(evidence.verdicts))
        said = publish(evidence, ", ".join(runs), place.parent)
        folder = place.parent / str(evidence.run.device["slug"])
        made = read(folder)
    except (EvidenceError, ReportError, XfailsError, OSError) as error:
        raise UsageError(str(error)) from None
    if state_directory().is_dir():
        remember_failures(evidence)
    console.print(headline(made), highlight=False)
    console.print(said, highlight=False)
    for note in notes(made):
        console.print(note, highlight=False)
    status = status_of(made)
    status = FAILED if strict and objections(made) else status
    return place.published(folder, status)


def _render(folder: Path) -> int:
    """Write the pages of a report again, and the index over it if there is one or if it is
    published; the exit code says what it says."""
    from verify.report import ReportError, index, read, write, write_index
    from verify.report.terminal import headline

    try:
        paths = write(read(folder), folder)
        made = read(folder)
        parent = folder.resolve().parent
        if (parent / index.NAME).exists() or parent == published_parent(None).resolve():
            write_index(parent)
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    console.print(headline(made), highlight=False)
    console.print(f"report: {paths[-1]}", highlight=False)
    return status_of(made)


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def compare(old: Path, new: Path) -> int:
    """Show what two reports (report.json, or its folder) differ in; exits 1 if anything is newly
    failing."""
    from verify.report import ReportError, read, render_comparison
    from verify.report import compare as comparison

    try:
        before, after = (
            read(path / "report.json" if path.is_dir() else path) for path in (old, new)
        )
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    found = comparison(before, after)
    console.print(render_comparison(found), markup=False, highlight=False, soft_wrap=True)
    return FAILED if found.newly_failing else CLEAN


@click.command()
@click.argument("folder", default=Path("reports"), type=click.Path(path_type=Path))
def recheck(folder: Path) -> int:
    """Compute the worst cases of all reports in FOLDER again, reference and bound, without running
    any kernel.

    Of gradients the reference alone: their bounds depend on what the kernel's forward saved. Pages
    that are not those of their report.json and of what lies beside it are named too, probes.md,
    sanitizer.md and the index over all reports among them. Exits 1 if anything disagrees.
    """
    from verify.campaign.recheck import recheck as again
    from verify.report import ReportError, index

    try:
        found = again(folder)
        listed = [] if (folder / "report.json").is_file() else index.disagreements(folder)
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    for one in found:
        console.print(
            f"{one.path}: {one.cases} worst cases computed again, {len(one.disagreeing)} disagree",
            highlight=False,
        )
        for text in one.disagreeing:
            say(console, f"  {text}")
        for ref in one.stale:
            console.print(
                f"  stale: the source of {ref} has changed since",
                style="yellow",
                markup=False,
                highlight=False,
            )
        for text in one.contradicting:
            say(console, f"  {text}")
        if one.contradicting:
            say(console, f"  verify report --render {one.path.parent} writes the pages again")
    for text in listed:
        say(console, text)
        say(console, f"  verify report --render {found[0].path.parent} writes it again")
    differ = listed or any(one.disagreeing or one.contradicting for one in found)
    return FAILED if differ else CLEAN
