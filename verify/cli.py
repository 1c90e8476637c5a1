"""The command line: run, fuzz, replay, report, compare, recheck, list, bench, sanitize, probe, oracles, test.

Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is incomplete.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from verify import device
from verify.applicability import list_oracles
from verify.case import Case
from verify.engine import CLEAN, FAILED, INFRASTRUCTURE, USAGE, Order, carry_out, evidence_of, failing, say
from verify.evidence import Evidence, EvidenceError, Verdict, is_plain, load, new_run_id
from verify.probes.command import probe
from verify.xfails import FILE, XfailsError, changed_since, xfails_in

console = Console(width=None if sys.stdout.isatty() else 140)  # a log file needs no narrow table


class UsageError(click.ClickException):
    """Something that the caller has to say differently."""

    exit_code = USAGE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def app() -> None:
    """Decides whether an attention kernel is right, and shows why.

    Start with `verify report` (an accuracy report of this machine), `verify run my_kernel.py` (your own kernel on trial) or
    `verify list` (who is on trial here).

    Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is incomplete.
    """


def _run_named(name: str | None) -> str:
    if name is None:
        return new_run_id()
    if not is_plain(name):
        raise UsageError(f"run-id: {name!r} is not a plain name")
    return name


_kernels = click.argument("kernels", nargs=-1, type=click.Path(path_type=Path))
_examples = click.option("--examples", type=int, help="Problems per variant, config, dtype and group of oracles.")
_workers = click.option("--workers", "-n", default="auto", show_default=True, help="Processes: auto, or a number; 0 for none.")
_profile = click.option(
    "--profile",
    type=click.Choice(["dev", "ci", "gpu", "nightly"]),
    help="How many cases, how random; default: what suits here.",
)
_select = click.option("-k", "select", default="", metavar="EXPRESSION", help="Only dockets whose id matches, as pytest -k.")
_TOOLS = ("memcheck", "racecheck")
_seed = click.option("--seed", type=int, help="Seed of the random search.")
_run_id = click.option(
    "--run-id", callback=lambda _, __, name: _run_named(name), help="Name the run, or go on with the one so named."
)


@app.command()
@_kernels
@_examples
@_profile
@_seed
@_workers
@_run_id
@_select
def run(kernels: tuple[Path, ...], workers: str, **chosen: Any) -> int:
    """Put KERNELS on trial (the collection under kernels/ if none is given): random problems before every oracle.

    A kernel file ends with VARIANT = Variant(...), or simply has a function attention(q, k, v, ...) that returns out or
    (out, lse).

    \b
    verify run my_kernel.py
    verify run --examples 200 -k bfloat16
    """
    files = _existing(kernels)
    order = Order(kernels=files, workers=_few(workers, files), **chosen)
    return _finish(order, carry_out(order, console))


@app.command()
@_kernels
@click.option("--max-time", default=300.0, show_default=True, help="Seconds.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failing verdict.")
@_workers
def fuzz(kernels: tuple[Path, ...], max_time: float, keep_going: bool, workers: str) -> int:
    """Search for a failing case until the time is over: rounds of fresh random problems, one evidence."""
    files = _existing(kernels)
    deadline = time.monotonic() + max_time
    order = Order(kernels=files, examples=25, workers=_few(workers, files), profile="dev")
    first = int.from_bytes(order.run_id[-6:].encode(), "big")
    status, rounds = CLEAN, 0
    while time.monotonic() < deadline and (status == CLEAN or (keep_going and status == FAILED)):
        status = carry_out(replace(order, seed=first + rounds), console, deadline)
        rounds += 1
    console.print(f"{rounds} rounds, seeds from {first}")
    return _finish(order, status)


@app.command()
@click.argument("case")
def replay(case: str) -> int:
    """Judge one CASE again, by the id that a failing verdict prints, and say FIXED or FAILED."""
    from verify.inputs import check_distribution
    from verify.replay import replay as again

    try:
        parsed = Case.parse(case)
        check_distribution(parsed.problem)
        return again(parsed, console)
    except ValueError as error:
        raise UsageError(str(error)) from None


@app.command()
@click.option("--out", "directory", default=Path("reports"), type=click.Path(path_type=Path), show_default=True, help="Parent.")
@_examples
@_profile
@_seed
@_workers
@_run_id
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
    where = directory / device.slug()
    order = Order(report_dir=where, **chosen)
    return _finish(order, carry_out(order, console), where)


def _report_of(runs: tuple[str, ...], parent: Path) -> int:
    """Write the report of runs that were judged before, and say where it is; exits 1 if a verdict failed."""
    from verify.campaign import publish, remember_failures
    from verify.court import state_directory
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
    return FAILED if failing(evidence) else CLEAN


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


@app.command()
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


@app.command(name="list")
@_kernels
def list_variants(kernels: tuple[Path, ...]) -> int:
    """List the variants, what they support, and whether they can run here."""
    from verify.court import not_here
    from verify.discovery import roster

    found = roster(list(_existing(kernels)) or None)
    table = Table("variant", "family", "dtypes", "head dims", "masks", "configs", "here")
    for declaration in found.declarations:
        support = declaration.support
        dims = f"{min(support.head_dims)}..{max(support.head_dims)}"
        names = ", ".join(config.name for config in declaration.configs)
        reason = not_here(declaration) or "yes"
        masks = ", ".join(support.masks) + (" and intersections" if support.intersections else "")
        table.add_row(declaration.ref, declaration.family, ", ".join(support.dtypes), dims, masks, names, reason)
    console.print(table)
    for failure in found.failures:
        say(console, f"{failure.ref} does not load: {failure.message}")
    return FAILED if found.failures else CLEAN


@app.command()
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


@app.command()
@click.option("--seconds", default=180.0, show_default=True, help="The most that judging cases may take.")
@_workers
@_select
def bench(seconds: float, workers: str, select: str) -> int:
    """Measure this suite itself: builds, judged cases per second with their breakdown, and the fp64 reference's rate."""
    from verify.bench import bench as measure

    return measure(console, seconds, workers, select)


@app.command()
@_kernels
@click.option("--tool", "tools", multiple=True, type=click.Choice(_TOOLS), default=_TOOLS, show_default=True)
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Only this one; a library's kernel too.")
@click.option("--case", metavar="ID", help="Only this case, which a failing verdict prints.")
@click.option("--quick", is_flag=True, help="One config and dtype of each variant, at most four problems.")
@click.option("--report-dir", type=click.Path(path_type=Path), help="Where sanitizer.json and sanitizer.md go as well.")
@_workers
def sanitize(
    kernels: tuple[Path, ...],
    tools: tuple[str, ...],
    variants: tuple[str, ...],
    case: str | None,
    quick: bool,
    report_dir: Path | None,
    workers: str,
) -> int:
    """Run KERNELS (the collection if none is given) under compute-sanitizer, planted faults before them."""
    from verify.sanitizers.command import Request
    from verify.sanitizers.command import sanitize as again

    if workers != "auto" and not workers.isdecimal():
        raise UsageError(f"--workers: {workers!r} is neither auto nor a number")
    try:
        parsed = Case.parse(case) if case is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    request = Request(
        kernels=_existing(kernels),
        tools=tools,
        variants=variants,
        case=parsed,
        quick=quick,
        workers=workers,
        report_dir=report_dir,
    )
    return again(request, console)


@app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> int:
    """Run the whole test suite (pytest -n auto); further arguments go to pytest."""
    from verify.cell.cell import ROOT

    words = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *arguments]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


app.add_command(probe)
app.add_command(list_oracles)


def _existing(kernels: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in kernels:
        if not path.is_file():
            raise UsageError(f"no such kernel file: {path}")
    return kernels


def _few(workers: str, files: tuple[Path, ...]) -> str:
    return "2" if workers == "auto" and len(files) == 1 else workers


def _finish(order: Order, status: int, where: Path | None = None) -> int:
    """Print what came out, and return the exit code."""
    evidence = evidence_of(order)
    if evidence is None or not evidence.verdicts:
        return INFRASTRUCTURE
    console.print(summary(evidence))
    _print_failures(evidence)
    for entry in evidence.not_run:
        console.print(f"not run: {entry.variant}: {entry.reason}", style="dim", markup=False, highlight=False)
    if changed_since():
        say(console, f"{FILE} has changed while this command ran: look at it before the next one, from which on it counts")
    folder = where or order.directory.parents[1] / "report" / str(evidence.run.device["slug"])
    console.print(f"run {order.run_id}; report: {folder / 'report.html'}", highlight=False)
    return status


def _print_failures(evidence: Evidence, most: int = 8) -> None:
    """The known defects that showed, and the smallest case of each (variant, config, oracle) that fails otherwise."""
    from verify.court import explain

    xfails = xfails_in(evidence)
    for told in dict.fromkeys(entry.told for entry in map(xfails.expecting, evidence.verdicts) if entry):
        console.print(f"known defect: {told}", markup=False, highlight=False)
    smallest: dict[tuple[str, str, str], Verdict] = {}
    for verdict in xfails.unexpected(evidence.verdicts):
        key = (verdict.variant, verdict.config, verdict.oracle)
        if key not in smallest or len(verdict.case) < len(smallest[key].case):
            smallest[key] = verdict
    for verdict in list(smallest.values())[:most]:
        say(console, f"\n{explain(verdict)}")
    if len(smallest) > most:
        console.print(f"\n... and {len(smallest) - most} more kinds of failures; the report has them all", style="red")


def summary(evidence: Evidence) -> Table:
    """One line per variant and dtype: cases, failures, worst r."""
    table = Table(
        Column("variant", overflow="fold"), "dtype", "cases", "failing", "r of O", "r of LSE", "r of gradients", "verdict"
    )
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in evidence.verdicts:
        found.setdefault((verdict.variant, verdict.dtype), []).append(verdict)
    for (variant, dtype), mine in sorted(found.items()):
        counted = [v for v in mine if v.counted]
        failing = len({v.case for v in mine if v.outcome == "fail"})
        groups = (("r_out",), ("r_lse",), ("r_dq", "r_dk", "r_dv"))
        worst = [max((v.measures[n] for v in counted for n in names if n in v.measures), default=None) for names in groups]
        shown = ["-" if value is None else f"{value:.3g}" for value in worst]
        mark = "[bold red]wrong[/]" if failing else "[green]holds[/]"
        table.add_row(variant, dtype, str(len({v.case for v in counted})), str(failing), *shown, mark)
    return table


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        result = app(prog_name="verify", standalone_mode=False)
    except click.exceptions.Abort:
        return INFRASTRUCTURE
    except click.ClickException as error:
        say(console, f"verify: {error.format_message()}")
        return USAGE
    except XfailsError as error:
        say(console, f"verify: {error}")
        return USAGE
    return result if isinstance(result, int) else CLEAN
