"""The command line: run, fuzz, replay, report, compare, list, bench, test.

Exit codes: 0 clean, 1 a verdict failed, 2 usage, 3 infrastructure, or a campaign that is incomplete.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.table import Table

from verify import device
from verify.case import Case, CaseError
from verify.engine import CLEAN, FAILED, INFRASTRUCTURE, USAGE, Order, carry_out, evidence_of
from verify.evidence import Evidence

app = typer.Typer(
    name="verify",
    help="Decides whether an attention kernel is right, and shows why.\n\n"
    "Start with: verify report (this machine's accuracy report), verify run my_kernel.py (your own kernel on trial), "
    "verify list (who is on trial here).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
console = Console()

Kernels = Annotated[list[Path] | None, typer.Argument(help="Kernel files; the collection under kernels/ if none is given.")]
Examples = Annotated[int | None, typer.Option(help="Problems per variant, config, dtype and group of oracles.")]
Workers = Annotated[str, typer.Option("--workers", "-n", help="Worker processes: auto, or a number; 0 for none.")]
Profile = Annotated[str | None, typer.Option(help="dev, ci, gpu or nightly; by default what suits this machine.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random search; printed with every campaign.")]
ReportDir = Annotated[Path | None, typer.Option(help="Where the report goes.")]


class UsageError(click.ClickException):
    """Something that the caller has to say differently."""

    exit_code = USAGE


@app.command()
def run(
    kernels: Kernels = None,
    examples: Examples = None,
    profile: Profile = None,
    seed: Seed = None,
    workers: Workers = "auto",
    select: Annotated[str, typer.Option("-k", help="Only dockets whose id matches, as pytest -k.")] = "",
) -> None:
    """Put kernels on trial: a bounded number of random problems before every oracle.

    KERNEL.py ends with VARIANT = Variant(...), or simply has a function attention(q, k, v, ...) -> out or (out, lse).

    Examples: verify run my_kernel.py; verify run --examples 200 -k bfloat16; verify run -n 0 my_kernel.py
    """
    files = _existing(kernels)
    order = Order(
        kernels=files, profile=profile, examples=examples, seed=seed, workers=_few(workers, files), select=select
    )
    raise typer.Exit(_finish(order, carry_out(order, console)))


@app.command()
def fuzz(
    kernels: Kernels = None,
    max_time: Annotated[float, typer.Option(help="Seconds.")] = 300.0,
    workers: Workers = "auto",
    keep_going: Annotated[bool, typer.Option(help="Do not stop at the first failing verdict.")] = False,
) -> None:
    """Search for a failing case until the time is over: rounds of fresh random problems, one evidence."""
    files = _existing(kernels)
    deadline = time.monotonic() + max_time
    order = Order(kernels=files, examples=25, workers=_few(workers, files), profile="dev")
    status, rounds = CLEAN, 0
    while time.monotonic() < deadline and (status == CLEAN or (keep_going and status == FAILED)):
        seed = int.from_bytes(order.run_id.encode()[-4:], "big") + rounds
        again = Order(**{**vars(order), "seed": seed})
        status, rounds = carry_out(again, console, deadline), rounds + 1
    console.print(f"{rounds} rounds")
    raise typer.Exit(_finish(order, status))


@app.command()
def replay(case: Annotated[str, typer.Argument(help="A case id, as a failing verdict prints it.")]) -> None:
    """Judge one case again and print FIXED or FAILED."""
    from verify.replay import replay as again

    try:
        parsed = Case.parse(case)
    except CaseError as error:
        raise UsageError(str(error)) from None
    raise typer.Exit(again(parsed, console))


@app.command()
def report(
    directory: Annotated[Path, typer.Option("--out", help="Parent folder; the report goes to a folder per device in it.")] = Path(
        "reports"
    ),
    examples: Examples = None,
    profile: Profile = None,
    seed: Seed = None,
    workers: Workers = "auto",
    from_run: Annotated[str | None, typer.Option("--run", help="Build it from that run's evidence, judging nothing.")] = None,
) -> None:
    """Judge the collection on this machine and write its accuracy report (report.json, report.md, report.html)."""
    where = directory / device.slug()
    if from_run is not None:
        from verify import campaign

        path = campaign.state_directory() / "runs" / from_run
        if not path.is_dir():
            raise UsageError(f"no run {from_run!r} under {path.parent}")
        console.print(campaign.report(campaign.join_run(path), where), highlight=False)
        raise typer.Exit(CLEAN)
    order = Order(profile=profile, examples=examples, seed=seed, workers=workers, report_dir=where)
    raise typer.Exit(_finish(order, carry_out(order, console), where))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="report.json, or the folder that holds it.")],
    new: Annotated[Path, typer.Argument(help="report.json, or the folder that holds it.")],
) -> None:
    """Show what two reports differ in: worse, better, newly failing, newly covered.  Exits 1 if anything is newly failing."""
    from verify.report import compare as comparison
    from verify.report import read, render_comparison
    from verify.report.schema import ReportError

    try:
        before, after = (read(path / "report.json" if path.is_dir() else path) for path in (old, new))
    except (ReportError, OSError) as error:
        raise UsageError(str(error)) from None
    found = comparison(before, after)
    console.print(render_comparison(found))
    raise typer.Exit(FAILED if found.newly_failing else CLEAN)


@app.command(name="list")
def list_variants(kernels: Kernels = None) -> None:
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
        console.print(f"{failure.ref} does not load: {failure.message}", style="red", markup=False)
    raise typer.Exit(FAILED if found.failures else CLEAN)


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(help="How long to judge cases for.")] = 60.0,
    workers: Workers = "auto",
) -> None:
    """Measure this suite itself: builds, judged cases per second with their breakdown, and the fp64 reference's rate."""
    from verify.bench import bench as measure

    raise typer.Exit(measure(console, seconds, workers))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def test(context: typer.Context) -> None:
    """Run the whole test suite (pytest -n auto); further arguments go to pytest."""
    from verify.cell.cell import ROOT

    words = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *context.args]
    raise typer.Exit(subprocess.run(words, cwd=ROOT, check=False).returncode)


def _existing(kernels: list[Path] | None) -> tuple[Path, ...]:
    for path in kernels or ():
        if not path.is_file():
            raise UsageError(f"no such kernel file: {path}")
    return tuple(kernels or ())


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
    folder = where or order.directory.parents[1] / "report" / str(evidence.run.device["slug"])
    console.print(f"run {order.run_id}; report: {folder / 'report.html'}", highlight=False)
    return status


def _print_failures(evidence: Evidence, most: int = 8) -> None:
    """The smallest failing case of each (variant, config, oracle)."""
    from verify.court import explain

    smallest = {}
    for verdict in evidence.verdicts:
        if verdict.outcome == "fail":
            key = (verdict.variant, verdict.config, verdict.oracle)
            if key not in smallest or len(verdict.case) < len(smallest[key].case):
                smallest[key] = verdict
    for verdict in list(smallest.values())[:most]:
        console.print(f"\n{explain(verdict)}", style="red", markup=False, highlight=False)
    if len(smallest) > most:
        console.print(f"\n... and {len(smallest) - most} more kinds of failures; the report has them all", style="red")


def summary(evidence: Evidence) -> Table:
    """One line per variant and dtype: cases, failures, worst r."""
    table = Table("variant", "dtype", "cases", "failing", "worst r (O)", "worst r (LSE)", "verdict")
    keys = sorted({(v.variant, v.dtype) for v in evidence.verdicts})
    for variant, dtype in keys:
        mine = [v for v in evidence.verdicts if (v.variant, v.dtype) == (variant, dtype)]
        counted = [v for v in mine if v.counted]
        failing = len({v.case for v in mine if v.outcome == "fail"})
        worst = [max((v.measures[name] for v in counted if name in v.measures), default=None) for name in ("r_out", "r_lse")]
        shown = ["-" if value is None else f"{value:.3g}" for value in worst]
        mark = "[bold red]wrong[/]" if failing else "[green]holds[/]"
        table.add_row(variant, dtype, str(len({v.case for v in counted})), str(failing), *shown, mark)
    return table


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        result = app(standalone_mode=False)
    except click.exceptions.Abort:
        return INFRASTRUCTURE
    except click.ClickException as error:
        console.print(f"verify: {error.format_message()}", style="red", markup=False, highlight=False)
        return USAGE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else INFRASTRUCTURE
    return result if isinstance(result, int) else CLEAN
