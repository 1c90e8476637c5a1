"""The sanitizers' report as JSON, as a page and as tables: planted faults, kernels, records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from verify.document import terminal
from verify.evidence.strict_json import decode
from verify.sanitizers import account as account_data
from verify.sanitizers import page
from verify.sanitizers.facts import Waiver
from verify.sanitizers.lane import PlantedSession, TriedSubject
from verify.sanitizers.records import Record

SCHEMA_VERSION = 1
_MOST_RECORDS = 20  # of one session


@dataclass(frozen=True, kw_only=True)
class Account:
    """A run of the sanitizers.

    whole: no option left anything out.  not_run: (variant, reason).  dead: unused waivers.
    """

    run: str
    device: dict[str, Any]
    sanitizer: str
    tools: tuple[str, ...]
    whole: bool
    planted: tuple[PlantedSession, ...]
    tried: tuple[TriedSubject, ...] = ()
    not_run: tuple[tuple[str, str], ...] = ()
    waivers: tuple[Waiver, ...] = ()
    dead: tuple[Waiver, ...] = ()
    seconds: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether every tool gave the required result for every planted kernel."""
        return bool(self.planted) and all(planted.holds for planted in self.planted)


def as_data(account: Account) -> dict[str, Any]:
    """The account as JSON-ready data."""
    return {
        "schema": SCHEMA_VERSION,
        "run": account.run,
        "device": account.device,
        "sanitizer": account.sanitizer,
        "tools": list(account.tools),
        "whole": account.whole,
        "seconds": round(account.seconds, 1),
        "planted": [_planted(planted) for planted in account.planted],
        "tried": [_tried(tried) for tried in account.tried],
        "not_run": [{"variant": variant, "reason": reason} for variant, reason in account.not_run],
        "waivers": [
            asdict(waiver) | {"dead": waiver in account.dead} for waiver in account.waivers
        ],
    }


def as_read(data: dict[str, Any]) -> account_data.Account:
    """The data in the types of `verify.sanitizers.account`, as a reader of sanitizer.json gets
    it."""
    return decode(account_data.Account, data)


def write(account: Account, folder: Path) -> list[Path]:
    """Write sanitizer.json and sanitizer.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "sanitizer.json", folder / "sanitizer.md"]
    data = as_data(account)
    paths[0].write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[1].write_text(page.markdown(as_read(data)), encoding="utf-8")
    return paths


def tables(account: Account) -> tuple[Table, Table]:
    """Of the planted kernels, with one column per tool; of the kernels on trial."""
    read = as_read(as_data(account))
    return terminal.render(page.planted(read)), terminal.render(page.kernels(read["tried"]))


def _planted(planted: PlantedSession) -> dict[str, Any]:
    fault, session = planted.fault, planted.session
    record = fault.shown_by(session.judgement)
    return {
        "variant": fault.variant,
        "about": fault.about,
        "tool": session.tool,
        "wanted": fault.wanted(session.tool),
        "outcome": session.judgement.outcome,
        "holds": planted.holds,
        "reasons": list(session.judgement.reasons),
        "record": None if record is None else _record(record),
        "seconds": round(session.seconds, 1),
    }


def _tried(tried: TriedSubject) -> dict[str, Any]:
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


def _record(record: Record) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if value and name != "words"}
