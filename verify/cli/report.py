"""`verify report`, `compare`, `recheck` and `witness`: make, compare and check reports, and keep
their worst cases."""

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
from verify.machine.extras import need
from verify.machine.places import published_parent, report_parent, state_directory


@dataclass(frozen=True)
class _Place:
    """The place for a report.

    directory: the parent given with --out, or None.  publish, replace, keep: the options of these
    names.
    """

    directory: Path | None
    publish: bool
    replace: bool
    keep: bool

    @property
    def parent(self) -> Path:
        """The parent of the folder that a report is written to first."""
        return report_parent(self.directory, self.publish)

    def published(self, folder: Path, status: int) -> int:
        """Publish the report in a folder if --publish was given.

        Returns the exit code: `status`, or USAGE if publishing is refused.
        """
        from verify.report import ReportError, read, write_index
        from verify.report.publishing import LossError, publish

        if not self.publish:
            return status
        target = published_parent(self.directory) / folder.name
        try:
            page, lost = publish(read(folder), target, replace=self.replace, keep=self.keep)
            write_index(target.parent)
        except OSError as error:
            raise UsageError(f"{target}: {error.strerror or error}") from None
        except LossError as error:
            say(
                console,
                f"verify: {error}; --replace publishes it all the same. This would be lost:",
            )
            for line in error.losses:
                say(console, f"  {line}")
            return USAGE
        except ReportError as error:
            raise UsageError(f"{target}: {error}") from None
        if lost:
            say(console, f"{target} covered more, and was replaced. This is lost:")
            for line in lost:
                say(console, f"  {line}")
        console.print(f"published: {page}", highlight=False)
        return status


@click.command()
@options.out
@click.option(
    "--publish",
    is_flag=True,
    help="Also write it to reports/<device>/, if it covers the report there.",
)
@click.option(
    "--replace", is_flag=True, help="Publish it even if it covers less than the report there."
)
@click.option(
    "--keep",
    is_flag=True,
    help="Publish it together with what the report there says of variants that it did not judge.",
)
@options.examples
@options.profile
@options.seed
@options.workers
@options.run_id
@options.strict
@options.with_files
@click.option(
    "--run",
    "from_runs",
    multiple=True,
    metavar="NAME",
    help=(
        "Build it from the evidence of that run, without judging; repeat it to merge runs. NAME can"
        " also be a directory of evidence."
    ),
)
@click.option(
    "--render",
    type=options.EXISTING,
    help="Write that folder's pages again, with its probes and sanitizer pages.",
)
@click.option(
    "--schema",
    type=click.Path(path_type=Path),
    help="Write the JSON Schemas of evidence, reports and xfails.toml into that folder.",
)
def report(
    directory: Path | None,
    publish: bool,
    replace: bool,
    keep: bool,
    from_runs: tuple[str, ...],
    render: Path | None,
    schema: Path | None,
    strict: bool,
    **choices: Any,
) -> int:
    """Judge the collection on this machine and write its accuracy report.

    It is written to .verify/report/<device>/report.{json,md,html}. --publish writes it to
    reports/<device>/ too, where it replaces another one only if it covers at least as much:
    variants, dtypes, groups of oracles, coverage bins, cases.
    """
    if (replace or keep) and not publish:
        raise UsageError(f"{'--replace' if replace else '--keep'}: needs --publish")
    if render is not None and (publish or from_runs):
        raise UsageError(
            "--render: writes a folder's pages again; --run and --publish make another report"
        )
    if render is not None or publish:
        need("matplotlib")  # pages that others read have their pictures
    if render is not None:
        return _render(render)
    if schema is not None:
        return _write_schemas(schema)
    place = _Place(directory, publish, replace, keep)
    if from_runs:
        return _report_of(from_runs, place, strict)
    from verify.machine import device

    where = place.parent / device.slug()
    request = RunRequest(report_dir=where, **choices)
    status = conclude(request, lambda: execute(request, console), where, strict=strict)
    return (
        place.published(where, status) if report_of(where, request.run_id) is not None else status
    )


def _write_schemas(folder: Path) -> int:
    from verify.report.json_schema import schemas

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in schemas().items():
            (folder / name).write_text(text, encoding="utf-8")
            say(console, f"written: {folder / name}")
    except OSError as error:
        raise UsageError(f"--schema: {folder}: {error.strerror or error}") from None
    return CLEAN


def _evidence_of(run: str) -> Path:
    """The directory of a run's evidence.  Raises UsageError."""
    stored = state_directory() / "runs" / run
    directory = next((path for path in (stored, Path(run)) if path.is_dir()), None)
    if directory is None:
        raise UsageError(f"no run {run!r} under {stored.parent}, and no such directory")
    return directory


def _report_of(runs: tuple[str, ...], place: _Place, strict: bool) -> int:
    """Write the report of earlier runs and print where it is; returns the report's exit code."""
    places = [_evidence_of(name) for name in runs]
    from verify.campaign.conclusion import publish, remember_failures
    from verify.report import ReportError, read
    from verify.report.terminal import headline, notes
    from verify.statistics.verdicts import findings

    options.load_kinds()
    try:
        evidence = load(*places)
        if not evidence.verdicts:
            raise ReportError(f"nothing was judged in {', '.join(runs)}")
        evidence = evidence.with_verdicts(findings(evidence.verdicts))
        summary = publish(evidence, ", ".join(runs), place.parent)
        folder = place.parent / str(evidence.run.device["slug"])
        built = read(folder)
    except (EvidenceError, ReportError, XfailsError, OSError) as error:
        raise UsageError(str(error)) from None
    if state_directory().is_dir():
        remember_failures(evidence)
    console.print(headline(built), highlight=False)
    console.print(summary, highlight=False)
    for note in notes(built):
        console.print(note, highlight=False)
    status = status_of(built)
    status = FAILED if strict and objections(built) else status
    return place.published(folder, status)


def _render(folder: Path) -> int:
    """Write the pages of a report again; returns the report's exit code.

    The index of its parent folder is written too, if there is one or if the report is published.
    """
    from verify.report import ReportError, index, read, write, write_index
    from verify.report.terminal import headline

    try:
        paths = write(read(folder), folder)
        built = read(folder)
        parent = folder.resolve().parent
        if (parent / index.NAME).exists() or parent == published_parent(None).resolve():
            write_index(parent)
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    console.print(headline(built), highlight=False)
    console.print(f"report: {paths[-1]}", highlight=False)
    return status_of(built)


@click.command()
@click.argument("old", type=options.EXISTING)
@click.argument("new", type=options.EXISTING)
def compare(old: Path, new: Path) -> int:
    """Show the differences of two reports, of two records of speed, or of both where both folders
    hold both (report.json, bench.json, or their folder).

    Exits 1 if anything is newly failing, or slower on the same device by more than the noise.
    """
    from verify.timing.record import NAME

    both = (old, new)
    speed = all((path / NAME if path.is_dir() else path).name == NAME for path in both)
    speed = speed and all(path.is_file() or (path / NAME).is_file() for path in both)
    alone = speed and not all((path / "report.json").is_file() for path in both)
    failed = False if alone else _compare_reports(old, new)
    slower = _compare_speed(old, new) if speed else False
    return FAILED if failed or slower else CLEAN


def _compare_reports(old: Path, new: Path) -> bool:
    """Show the differences; returns whether anything is newly failing."""
    from verify.report import ReportError, read, render_comparison
    from verify.report import compare as comparison

    try:
        before, after = (
            read(path / "report.json" if path.is_dir() else path) for path in (old, new)
        )
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    differences = comparison(before, after)
    console.print(render_comparison(differences), markup=False, highlight=False, soft_wrap=True)
    return bool(differences.newly_failing)


def _compare_speed(old: Path, new: Path) -> bool:
    """Show which kernels became slower; returns whether one did, on the same device."""
    from verify.document import terminal
    from verify.timing import compare as timing
    from verify.timing.record import RecordError, read

    try:
        found = timing.compare(read(old), read(new))
    except RecordError as error:
        raise UsageError(str(error)) from None
    shown = terminal.page(timing.document(found), max(console.width, 140))
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
    return found.regressed


@click.command()
@click.argument("folder", default=Path("reports"), type=options.EXISTING)
@options.with_files
def recheck(folder: Path) -> int:
    """Compute the worst cases of all reports in FOLDER again, reference and bound, without running
    any kernel.

    For gradients only the reference is computed: their bounds depend on what the kernel's forward
    saved. The pages (also probes.md, sanitizer.md and the index of all reports) are compared with
    the JSON files that they are made from. Exits 1 if anything disagrees.
    """
    from verify.report import ReportError, index, reports_in

    need("matplotlib")  # the pages hold pictures, which are drawn again
    options.load_kinds()
    try:
        reports = reports_in(folder)
        from verify.campaign.recheck import recheck as recheck_reports  # imports torch

        rechecks = recheck_reports(reports)
        listed = [] if (folder / "report.json").is_file() else index.disagreements(folder)
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    for one in rechecks:
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
        say(console, f"  verify report --render {rechecks[0].path.parent} writes it again")
    differ = listed or any(one.disagreeing or one.contradicting for one in rechecks)
    return FAILED if differ else CLEAN


@click.command()
@click.argument("folder", default=Path("reports"), type=options.EXISTING)
@click.option(
    "--write", "writes", is_flag=True, help="Write them at the end of the kernels' files."
)
def witness(folder: Path, writes: bool) -> int:
    """List the worst case of each variant on each device, from the reports in FOLDER.

    With --write, each file under kernels/ ends with those of its variants. They are judged first in
    each run, and they do not change the source hash.
    """
    from verify.campaign import witnesses
    from verify.report import ReportError
    from verify.variant import DeclarationError

    try:
        found = witnesses.published(folder)
    except (ReportError, DeclarationError, OSError) as error:
        raise UsageError(str(error)) from None
    if not found:
        raise UsageError(f"{folder}: no report in it has a worst case")
    for line in witnesses.lines(found):
        say(console, line)
    for path in witnesses.write(found) if writes else ():
        say(console, f"written: {path}")
    return CLEAN
