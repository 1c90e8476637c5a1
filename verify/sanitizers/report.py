"""The lane's own report: what was planted and caught, what was tried and found, as JSON, markdown and a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from verify.sanitizers.facts import Waiver
from verify.sanitizers.lane import Trialled, Tried
from verify.sanitizers.records import Record

SCHEMA_VERSION = 1
_MOST_RECORDS = 20  # of one session


@dataclass(frozen=True, kw_only=True)
class Account:
    """A run, told.  whole: nothing was left out by an option; not_run: variant and reason; dead: waivers without use."""

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
        "planted": [_planted(trialled) for trialled in account.planted],
        "tried": [_tried(tried) for tried in account.tried],
        "not_run": [{"variant": variant, "reason": reason} for variant, reason in account.not_run],
        "waivers": [asdict(waiver) | {"dead": waiver in account.dead} for waiver in account.waivers],
    }


def write(account: Account, folder: Path) -> list[Path]:
    """Write sanitizer.json and sanitizer.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "sanitizer.json", folder / "sanitizer.md"]
    paths[0].write_text(json.dumps(as_data(account), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(account), encoding="utf-8")
    return paths


def table(account: Account) -> Table:
    """One line per variant and tool."""
    shown = Table(Column("variant", overflow="fold"), "tool", "processes", "cases", "records", "seconds", "verdict")
    for row in _rows(account.tried):
        colour = "green" if row[-1] == "clean" else "bold red"
        shown.add_row(*row[:-1], f"[{colour}]{row[-1]}[/]")
    return shown


def planted_table(account: Account) -> Table:
    """One line per planted kernel, one column per tool."""
    shown = Table("planted", "what", *account.tools)
    for row in _matrix(account):
        shown.add_row(*row)
    return shown


def markdown(account: Account) -> str:
    """The account as a page."""
    device = account.device
    about = ", ".join(str(device[name]) for name in ("name", "driver") if device.get(name))
    scope = "" if account.whole else "\nOnly a part of the collection was tried.\n"
    parts = [
        "# Sanitizers",
        f"compute-sanitizer {account.sanitizer} on {about}; run {account.run}, {account.seconds:.0f} s.\n{scope}",
        "## Planted faults",
        "Tried in the same run, in the same way. A tool that misses what it must catch makes the whole run fail.\n",
        _page_table(("planted", "what", *account.tools), _matrix(account)),
        "## Kernels",
        _page_table(("variant", "tool", "processes", "cases", "records", "seconds", "verdict"), _rows(account.tried)),
    ]
    if account.waivers:
        rows = [(w.tool, w.kind, w.kernel, w.reason, w.proof, "dead" if w in account.dead else "used") for w in account.waivers]
        parts += ["## Exceptions", _page_table(("tool", "kind", "kernel", "reason", "proof", ""), rows)]
    else:
        parts += ["## Exceptions", "None: every record counts.\n"]
    findings = [f"- `{id_}` {tool}: {outcome}" for id_, tool, outcome in _failing(account.tried)]
    parts += ["## Findings", "\n".join(findings) + "\n" if findings else "None.\n"]
    if account.not_run:
        parts += ["## Not run", "\n".join(f"- {variant}: {reason}" for variant, reason in account.not_run) + "\n"]
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def _rows(tried: Sequence[Tried]) -> list[tuple[str, ...]]:
    """Per variant and tool: processes, cases, records, seconds, the worst outcome."""
    rows = []
    for variant, tool in dict.fromkeys((t.subject.declaration.ref, t.tool) for t in tried):
        mine = [t for t in tried if (t.subject.declaration.ref, t.tool) == (variant, tool)]
        cases = sum(len(t.outcomes) for t in mine)
        bad = [outcome for t in mine for outcome in t.outcomes.values() if outcome != "clean"]
        verdict = "clean" if cases and not bad else f"{len(bad)} of {cases} {'/'.join(sorted(set(bad)))}"
        numbers = (sum(len(t.sessions) for t in mine), cases, sum(t.records for t in mine))
        rows.append((variant, tool, *map(str, numbers), f"{sum(t.seconds for t in mine):.0f}", verdict))
    return rows


def _matrix(account: Account) -> list[tuple[str, ...]]:
    rows = []
    for fault in dict.fromkeys(trialled.fault for trialled in account.planted):
        mine = {t.session.tool: t for t in account.planted if t.fault == fault}
        rows.append((fault.variant, fault.about, *(_word(mine[tool]) for tool in account.tools if tool in mine)))
    return rows


def _word(trialled: Trialled) -> str:
    judgement, wanted = trialled.session.judgement, trialled.fault.wanted(trialled.session.tool)
    if trialled.fault.shown_by(judgement) is not None and not trialled.fault.twin:
        return "caught"
    said = "not seen" if judgement.outcome == "clean" and not trialled.fault.twin else judgement.outcome
    return said if trialled.holds else f"{said}, wanted {wanted}"


def _page_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def _failing(tried: Sequence[Tried]) -> list[tuple[str, str, str]]:
    return [(id_, t.tool, outcome) for t in tried for id_, outcome in t.outcomes.items() if outcome != "clean"]


def _planted(trialled: Trialled) -> dict[str, Any]:
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


def _tried(tried: Tried) -> dict[str, Any]:
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
                "records": [_record(record) for record in session.judgement.records[:_MOST_RECORDS]],
                "exit_code": session.facts.exit_code,
                "seconds": round(session.seconds, 1),
            }
            for session in tried.sessions
        ],
    }


def _record(record: Record) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if value and name != "words"}
