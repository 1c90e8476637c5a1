"""What a run ends with on the terminal: the table, the failures, the path of the report."""

from __future__ import annotations

from pathlib import Path

from rich.table import Column, Table

from verify.cli.options import console
from verify.engine import INFRASTRUCTURE, Order, evidence_of, say
from verify.evidence import Evidence, Verdict
from verify.xfails import FILE, changed_since, xfails_in


def finish(order: Order, status: int, where: Path | None = None) -> int:
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
