"""The lane's own report: what was planted and caught, tried and found, as JSON, a page and
tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from verify.sanitizers import account, page
from verify.sanitizers.account import SCHEMA_VERSION, Account, KnownFalse, Planted, Shown
from verify.sanitizers.facts import Waiver
from verify.sanitizers.lane import Trialled, Tried
from verify.sanitizers.records import Record

_MOST_RECORDS = 20  # of one session


@dataclass(frozen=True, kw_only=True)
class LaneRun:
    """What a run of the lane did.  whole: nothing was left out by an option; not_run: variant and
    reason; dead: waivers without use."""

    run: str
    device: dict[str, Any]
    sanitizer: str
    tools: tuple[str, ...]
    whole: bool
    planted: tuple[Trialled, ...]
    tried: tuple[Tried, ...] = ()
    not_run: tuple[tuple[str, str], ...] = ()
    waivers: tuple[Waiver, ...] = ()
    dead: tuple[Waiver, ...] = ()
    seconds: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether every tool caught what it must, and nothing else."""
        return bool(self.planted) and all(trialled.holds for trialled in self.planted)


def told(run: LaneRun) -> Account:
    """The run as sanitizer.json tells it."""
    return {
        "schema": SCHEMA_VERSION,
        "run": run.run,
        "device": run.device,
        "sanitizer": run.sanitizer,
        "tools": list(run.tools),
        "whole": run.whole,
        "seconds": round(run.seconds, 1),
        "planted": [_planted(trialled) for trialled in run.planted],
        "tried": [_tried(tried) for tried in run.tried],
        "not_run": [{"variant": variant, "reason": reason} for variant, reason in run.not_run],
        "waivers": [_waiver(waiver, waiver in run.dead) for waiver in run.waivers],
    }


def write(run: LaneRun, folder: Path) -> list[Path]:
    """Write sanitizer.json and sanitizer.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "sanitizer.json", folder / "sanitizer.md"]
    data = told(run)
    paths[0].write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[1].write_text(page.markdown(data), encoding="utf-8")
    return paths


def table(run: LaneRun) -> Table:
    """One line per variant and tool."""
    shown = Table(
        Column("variant", overflow="fold"),
        "tool",
        "processes",
        "cases",
        "records",
        "seconds",
        "verdict",
    )
    for row in page.rows(told(run)["tried"]):
        colour = "green" if row[-1] == "clean" else "bold red"
        shown.add_row(*row[:-1], f"[{colour}]{row[-1]}[/]")
    return shown


def planted_table(run: LaneRun) -> Table:
    """One line per planted kernel, one column per tool."""
    shown = Table("planted", "what", *run.tools)
    for row in page.matrix(told(run)):
        shown.add_row(*row)
    return shown


def _planted(trialled: Trialled) -> Planted:
    fault, session = trialled.fault, trialled.session
    record = fault.shown_by(session.judgement)
    return {
        "variant": fault.variant,
        "about": fault.about,
        "tool": session.tool,
        "wanted": fault.wanted(session.tool),
        "outcome": session.judgement.outcome,
        "holds": trialled.holds,
        "reasons": list(session.judgement.reasons),
        "record": None if record is None else _record(record),
        "seconds": round(session.seconds, 1),
    }


def _tried(tried: Tried) -> account.Tried:
    return {
        "variant": tried.subject.declaration.ref,
        "family": tried.subject.declaration.family,
        "source_hash": tried.subject.declaration.source_hash,
        "config": tried.subject.config.name,
        "dtype": tried.subject.dtype,
        "tool": tried.tool,
        "outcome": tried.outcome,
        "cases": tried.outcomes,
        "processes": [
            {
                "cases": len(session.subject.cases),
                "outcome": session.judgement.outcome,
                "reasons": list(session.judgement.reasons),
                "total": session.judgement.total,
                "records": [
                    _record(record) for record in session.judgement.records[:_MOST_RECORDS]
                ],
                "exit_code": session.facts.exit_code,
                "seconds": round(session.seconds, 1),
            }
            for session in tried.sessions
        ],
    }


def _waiver(waiver: Waiver, dead: bool) -> KnownFalse:
    return {
        "tool": waiver.tool,
        "kind": waiver.kind,
        "kernel": waiver.kernel,
        "words": waiver.words,
        "reason": waiver.reason,
        "proof": waiver.proof,
        "dead": dead,
    }


def _record(record: Record) -> Shown:
    return {name: value for name, value in asdict(record).items() if value and name != "words"}
