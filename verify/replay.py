"""Replay: judge one case again, from its id alone."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from verify.campaign import open_run
from verify.case import Case
from verify.court import not_here
from verify.engine import CLEAN, FAILED, INFRASTRUCTURE, USAGE, say
from verify.explanation import explain


def replay(case: Case, console: Console) -> int:
    """Hear the case in a run of its own and say FIXED or FAILED; returns an exit code."""
    if case.group == "sanitizer":
        from verify.sanitizers.command import Request, sanitize

        return sanitize(Request(case=case), console)
    file, at, _ = case.variant.rpartition("@")
    run = open_run("dev", [Path(file)] if at else [])
    for failure in run.roster.failures:
        if at:
            say(console, f"FAILED  {failure.ref} does not load: {failure.message}")
            return FAILED
    known = {declaration.ref: declaration for declaration in run.roster.declarations}
    if case.variant not in known:
        say(console, f"verify: unknown variant {case.variant!r} (known: {', '.join(sorted(known))})")
        return USAGE
    reason = not_here(known[case.variant])
    if reason is not None:
        say(console, f"verify: {case.variant} cannot run here: {reason}")
        return INFRASTRUCTURE
    docket = run.docket_of(case)
    if docket is None:
        names = ", ".join(config.name for config in known[case.variant].configs)
        say(console, f"verify: {case.variant} has no config {case.config!r} (configs: {names})")
        return USAGE
    court = run.court("replay")
    try:
        verdicts = court.hear(docket, case.problem, "witness")
    finally:
        court.close()
    for verdict in verdicts:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in verdict.measures.items())
        console.print(f"{verdict.outcome:12} {verdict.oracle:12} {numbers}", markup=False, highlight=False)
    failed = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    for verdict in failed:
        say(console, f"\n{explain(verdict)}")
    console.print("FAILED" if failed else "FIXED", style="bold red" if failed else "bold green")
    return FAILED if failed else CLEAN
