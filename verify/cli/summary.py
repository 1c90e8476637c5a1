"""The summary of a run on the terminal: each variant's state, failures, how to continue, report."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from rich.table import Column, Table
from rich.text import Text

from verify.campaign.gpus import accounting
from verify.campaign.runner import (
    CLEAN,
    FAILED,
    INFRASTRUCTURE,
    USAGE,
    Interrupted,
    RunRequest,
    evidence_of,
    failing,
    say,
)
from verify.cli.files import Files
from verify.cli.options import console
from verify.evidence import NO_KERNEL, Evidence, Verdicts
from verify.evidence.errors import JudgeError
from verify.evidence.errors import read as errors_of
from verify.evidence.explanation import explain, smallest
from verify.evidence.known_failures import FILE, Xfails, changed_since, xfails_in

if TYPE_CHECKING:
    from verify.report import Report
    from verify.report.terminal import Beside

WRONG, HOLDS, KNOWN = "wrong", "holds", "known defect"
INCOMPLETE, JUDGE_ERROR, NOT_RUN = "incomplete", "judge error", "not run"
_STYLES = {
    WRONG: "bold red",
    HOLDS: "green",
    KNOWN: "yellow",
    JUDGE_ERROR: "bold red",
    INCOMPLETE: "yellow",
}
_LINES = 8  # kinds of failures, or errors, that are printed in full


@dataclass(frozen=True)
class Line:
    """One variant and dtype: its state, the reason ("" if the table is enough), its verdicts."""

    variant: str
    dtype: str
    state: str
    reason: str = ""
    verdicts: Verdicts = field(default_factory=Verdicts)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    shortfalls: (variant, dtype) -> what the report misses for it; None if this run made no report,
    so that nothing is known to be complete.  errors: failures that are no verdicts.
    """

    evidence: Evidence
    xfails: Xfails = field(default_factory=Xfails)
    errors: tuple[JudgeError, ...] = ()
    shortfalls: dict[tuple[str, str], str] | None = None

    def lines(self) -> Iterator[Line]:
        """Every variant on trial and each of its dtypes, sorted."""
        judged: dict[str, dict[str, Verdicts]] = defaultdict(dict)
        for (variant, dtype), verdicts in self.evidence.verdicts.by_dtype().items():
            judged[variant][dtype] = verdicts
        absent = {entry.variant: entry.reason for entry in self.evidence.not_run if not entry.dtype}
        for variant in sorted({*judged, *(entry.ref for entry in self.evidence.variants)}):
            if variant not in judged:
                yield self._unjudged(variant, absent.get(variant))
            for dtype, verdicts in sorted(judged[variant].items()):
                yield self._judged(variant, dtype, verdicts)

    def _unjudged(self, variant: str, absent: str | None) -> Line:
        error = self._error(variant)
        if error is not None:
            return Line(variant, "-", JUDGE_ERROR, error)
        if absent is not None:
            return Line(variant, "-", NOT_RUN, absent)
        return Line(variant, "-", NOT_RUN, "none of its cases was begun")

    def _judged(self, variant: str, dtype: str, verdicts: Verdicts) -> Line:
        if self.xfails.unexpected(verdicts):
            return Line(variant, dtype, WRONG, "", verdicts)
        error = self._error(variant)
        if error is not None:
            return Line(variant, dtype, JUDGE_ERROR, error, verdicts)
        if self.shortfalls is None:
            return Line(
                variant, dtype, INCOMPLETE, "the campaign did not come to its end", verdicts
            )
        shortfall = self.shortfalls.get((variant, dtype))
        if shortfall is not None:
            return Line(variant, dtype, INCOMPLETE, shortfall, verdicts)
        known = bool(verdicts.failing)
        return Line(variant, dtype, KNOWN if known else HOLDS, "", verdicts)

    def _error(self, variant: str) -> str | None:
        return next((error.message for error in self.errors if error.variant == variant), None)


def conclude(
    request: RunRequest,
    judge: Callable[[], int],
    where: Path | None = None,
    complete: bool = True,
    strict: bool = False,
    files: Files | None = None,
) -> int:
    """Run a campaign with `judge`, print its results, and return the exit code.

    where: the folder of its report, if it is not the usual one.  complete: whether an incomplete
    campaign is an error.  strict: whether a grave state (`verify.report.states`) fails.  files:
    what to write for other programs.
    """
    try:
        status = judge()
    except Interrupted:
        return _interrupted(request)
    return finish(request, status, where, complete, strict, files)


def finish(
    request: RunRequest,
    status: int,
    where: Path | None = None,
    complete: bool = True,
    strict: bool = False,
    files: Files | None = None,
) -> int:
    """Print the results of a run that has ended, and return the exit code."""
    evidence = evidence_of(request)
    _account(request)
    if status == USAGE or evidence is None or not evidence.verdicts:
        _print_errors(errors_of(request.directory))
        return status if status == USAGE else INFRASTRUCTURE
    folder = where or request.directory.parents[1] / "report" / str(evidence.run.device["slug"])
    report = report_of(folder, request.run_id)
    stopped = request.exit_first and status == FAILED
    shortfalls = None if report is None or stopped else _shortfalls(report)
    outcome = Outcome(evidence, xfails_in(evidence), errors_of(request.directory), shortfalls)
    lines = _show(outcome, report)
    if files is not None:
        files.write(report)
    if changed_since():
        say(
            console,
            f"{FILE} has changed while this command ran: check it; the next command uses it",
        )
    if stopped:
        console.print(
            "stopped at the first failure; without -x all cases are judged",
            style="yellow",
            highlight=False,
        )
    if report is not None:
        console.print(f"run {request.run_id}; report: {folder / 'report.html'}", highlight=False)
    else:
        console.print(
            f"run {request.run_id}; verify report --run {request.run_id} makes its report",
            highlight=False,
        )
    open_states = any(line.state in (INCOMPLETE, JUDGE_ERROR) for line in lines)
    if status == CLEAN and complete and open_states:
        status = INFRASTRUCTURE
    if report is None:
        return status
    if status == CLEAN and complete:
        status = status_of(report)
    return FAILED if strict and objections(report) else status


def status_of(report: Report) -> int:
    """The exit code of a report; prints what keeps it from being complete."""
    from verify.report.outcome import outcome
    from verify.report.terminal import gaps

    state = outcome(report)
    if state == "incomplete":
        for gap in gaps(report):
            console.print(gap, highlight=False)
    return {"clean": CLEAN, "failed": FAILED, "incomplete": INFRASTRUCTURE}[state]


def objections(report: Report) -> bool:
    """Whether `--strict` objects to something; prints each reason."""
    from verify.report.states import strictly

    reasons = strictly(report)
    for reason in reasons:
        say(console, f"--strict: {reason}")
    return bool(reasons)


def _interrupted(request: RunRequest) -> int:
    """Print how far an interrupted run came and how to continue it; returns the exit code.

    A failure on record still counts.
    """
    evidence = evidence_of(request)
    _account(request)
    cases = 0 if evidence is None else len(evidence.verdicts.counted.cases)
    failed = evidence is not None and bool(evidence.verdicts) and failing(evidence)
    if evidence is not None and evidence.verdicts:
        _show(Outcome(evidence, xfails_in(evidence), errors_of(request.directory)))
    console.print(
        f"interrupted after {cases} case{'' if cases == 1 else 's'}",
        style="bold yellow",
        highlight=False,
    )
    console.print(
        f"continue with: {continue_command(request.run_id)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return FAILED if failed else INFRASTRUCTURE


def _account(request: RunRequest) -> None:
    """Count what each GPU did, and print it if there are several, or if one is quarantined."""
    found = accounting.remember(request.directory)
    if len(found) > 1 or any(each.quarantined for each in found):
        console.print(accounting.table(found))


def continue_command(run_id: str) -> str:
    """The shell command that continues the run: the command given by the user, with the run's
    id."""
    context = click.get_current_context()
    command = ["verify", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if (
            name == "run_id"
            or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
        ):
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            command += map(str, value)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            command.append(parameter.opts[0])
        elif parameter.multiple:
            command += [word for each in value for word in (parameter.opts[0], str(each))]
        else:
            command += [parameter.opts[0], str(value)]
    return shlex.join([*command, "--run-id", run_id])


def report_of(folder: Path, run_id: str) -> Report | None:
    """The report that this run wrote to the folder, or None: another run's report can be there."""
    from verify.report import ReportError, read

    try:
        report = read(folder)
    except (OSError, ReportError):
        return None
    return report if run_id in report["run"].split(", ") else None


def _shortfalls(report: Report) -> dict[tuple[str, str], str]:
    """(variant, dtype) -> the report's reasons, for those that were judged incompletely."""
    from verify.report.unjudged import is_reason

    shortfalls = {}
    for variant in report["variants"]:
        lost = [reason for reason in variant["reasons"] if is_reason(reason)]
        for dtype in variant["dtypes"]:
            if variant["cases"] and (dtype["status"] == "grey" or dtype["bins_missing"] or lost):
                shortfalls[variant["ref"], dtype["dtype"]] = "; ".join([*dtype["reasons"], *lost])
    return shortfalls


def _show(outcome: Outcome, report: Report | None = None) -> list[Line]:
    """Print the report's first line, the table, notes, the reasons of states, errors and
    failures."""
    from verify.report.terminal import Beside, headline, notes

    if report is not None:
        console.print(headline(report), highlight=False)
    lines = list(outcome.lines())
    console.print(table(lines, Beside(report)))
    for note in notes(report) if report is not None else ():
        console.print(note, highlight=False)
    dtypes_of: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for line in lines:
        if line.reason and line.state != JUDGE_ERROR:
            dtypes_of[line.state, line.variant, line.reason].append(line.dtype)
    for (state, variant, reason), dtypes in dtypes_of.items():
        named = "" if dtypes == ["-"] else f" ({', '.join(dtypes)})"
        console.print(
            f"{state}: {variant}{named}: {reason}", style="dim", markup=False, highlight=False
        )
    for entry in outcome.evidence.not_run:
        if entry.dtype:
            word = "" if entry.dtype == NO_KERNEL else "not run: "
            console.print(
                f"{word}{entry.variant}: {entry.reason}",
                style="dim",
                markup=False,
                highlight=False,
            )
    _print_errors(outcome.errors)
    _print_failures(outcome)
    return lines


def _print_errors(errors: tuple[JudgeError, ...]) -> None:
    for error in errors[:_LINES]:
        say(
            console,
            f"judge error: {error.variant or error.test}: {error.message} (in {error.test})",
        )
    if len(errors) > _LINES:
        say(console, f"... and {len(errors) - _LINES} more errors of the judge")


def _print_failures(outcome: Outcome) -> None:
    """Print the known defects that showed, and the smallest case of each other failing (variant,
    config, oracle)."""
    verdicts = outcome.evidence.verdicts
    for defect in dict.fromkeys(
        entry.told for entry in map(outcome.xfails.expecting, verdicts.failing) if entry
    ):
        console.print(f"known defect: {defect}", markup=False, highlight=False)
    failures = smallest(outcome.xfails.unexpected(verdicts))
    for verdict in failures[:_LINES]:
        say(console, f"\n{explain(verdict)}")
    if len(failures) > _LINES:
        more = len(failures) - _LINES
        console.print(
            f"\n... and {more} more kinds of failures; the report has them all", style="red"
        )


def table(lines: list[Line], beside: Beside) -> Table:
    """A table with one row per line: cases, failing cases, the worst r of each tensor, state."""
    rows = Table(
        Column("variant", overflow="fold"),
        "dtype",
        "cases",
        "failing",
        "r of O",
        "r of LSE",
        "r of gradients",
        "bound / best",
        "state",
    )
    for line in lines:
        counted = line.verdicts.counted
        cases = counted.cases
        failed = {verdict.case for verdict in counted.failing}
        groups = (("r_out",), ("r_lse",), ("r_dq", "r_dk", "r_dv"))
        ratios = [_worst(counted, names) for names in groups]
        if ratios[-1] == "-":
            ratios[-1] = beside.gradients(line.variant)
        ratios.append(beside.leniency(line.variant, line.dtype))
        marks = beside.marks(line.variant)
        style = "bold yellow" if marks and line.state == HOLDS else _STYLES.get(line.state, "dim")
        state = Text(line.state + marks, style=style)
        rows.add_row(
            Text(line.variant), line.dtype, str(len(cases)), str(len(failed)), *ratios, state
        )
    return rows


def _worst(verdicts: Verdicts, names: tuple[str, ...]) -> str:
    from verify.evidence.columns import column

    measured = [ratios.largest for name in names if len(ratios := column(verdicts, name))]
    return f"{max(measured):.3g}" if measured else "-"
