"""The sanitizers' report as JSON, as a page and as tables: planted faults, kernels, records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from verify.bundle import ROOT
from verify.document import terminal
from verify.evidence.strict_json import dumps
from verify.sanitizers import account, counts, exports, page
from verify.sanitizers.account import (
    SCHEMA_VERSION,
    Account,
    Failed,
    KnownFalse,
    Planted,
    Shown,
)
from verify.sanitizers.course import Stage
from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.failures import Failure
from verify.sanitizers.records import Record
from verify.sanitizers.results import PlantedSession, TriedSubject, not_alive, used


@dataclass(frozen=True, kw_only=True)
class LaneRun:
    """What a run of the sanitizers did.

    whole: no option left anything out.  not_run: (variant, reason).  waivers: those for this
    version of the tool.  dead: of them, those that nothing needed.
    cut: why it ended early, or "".  workers: processes at the same time.  stages: by name.
    earlier: accounts of runs whose counts of planted faults are added.
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
    cut: str = ""
    workers: int = 0
    stages: Mapping[str, Stage] = field(default_factory=dict)
    earlier: tuple[Account, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether every tool gave the required result for every planted kernel, and something
        caught every known-bad copy."""
        return bool(self.planted) and self.alive_tools == self.tools and not self.uncaught

    @property
    def uncaught(self) -> list[str]:
        """Known-bad copies of shipped kernels that nothing caught."""
        return exports.uncaught(map(_planted, self.planted))

    @property
    def alive_tools(self) -> tuple[str, ...]:
        """The tools that gave the required result for every planted kernel."""
        dead = not_alive(self.tools, self.planted)
        return tuple(tool for tool in self.tools if tool not in dead)


def told(run: LaneRun) -> Account:
    """The run as sanitizer.json tells it.  Raises ValueError if earlier runs cannot be added."""
    return counts.together(_own(run), run.earlier)


def _own(run: LaneRun) -> Account:
    """The run, without the earlier ones that are added to it."""
    return {
        "schema": SCHEMA_VERSION,
        "run": run.run,
        "device": run.device,
        "sanitizer": run.sanitizer,
        "tools": list(run.tools),
        "whole": run.whole,
        "seconds": round(run.seconds, 1),
        "planted": [_planted(planted) for planted in run.planted],
        "tried": [_tried(tried) for tried in run.tried],
        "failures": [_failure(failure) for tried in run.tried for failure in tried.failures],
        "not_run": [{"variant": variant, "reason": reason} for variant, reason in run.not_run],
        "waivers": [_waiver(waiver, run) for waiver in run.waivers],
        "cut": run.cut,
        "workers": run.workers,
        "stages": {name: _stage(stage) for name, stage in sorted(run.stages.items())},
    }


def write(run: LaneRun, folder: Path) -> list[Path]:
    """Write a run's account into a folder (`write_account`)."""
    return write_account(told(run), folder)


def write_account(data: Account, folder: Path) -> list[Path]:
    """Write an account as JSON, SARIF, JUnit XML and a page; returns their paths, the page's
    last."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "sanitizer.json": _json(data),
        "sanitizer.sarif": _json(exports.sarif(data)),
        "sanitizer.junit.xml": exports.junit(data),
        "sanitizer.md": page.markdown(data),
    }
    for name, text in texts.items():
        # Whole, so that one who ends the run while it writes leaves the file before.
        part = folder / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    return [folder / name for name in texts]


def _json(data: object) -> str:
    return dumps(data, depth=2) + "\n"


def tables(run: LaneRun) -> tuple[Table, Table]:
    """Of the planted kernels, with one column per tool; of the kernels on trial."""
    data = told(run)
    return terminal.render(page.planted(data)), terminal.render(page.kernels(data["tried"]))


def _planted(planted: PlantedSession) -> Planted:
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
        "blind": fault.blind(session.tool),
        "copy_of": fault.copy_of,
        "spare": fault.spare,
        "hangs": planted.hangs,
        "tries": planted.tries,
        "held": planted.held,
    }


def _stage(stage: Stage) -> account.Stage:
    return {
        "begun": round(stage.begun, 1),
        "ended": round(stage.ended, 1),
        "processes": stage.processes,
        "busy": round(stage.busy, 1),
    }


def _tried(tried: TriedSubject) -> account.Tried:
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
                "exit_code": session.facts.exit_code,
                "seconds": round(session.seconds, 1),
            }
            for session in tried.sessions
        ],
    }


def _failure(failure: Failure) -> Failed:
    return {
        "variant": failure.case.variant,
        "config": failure.case.config,
        "dtype": failure.dtype,
        "case": failure.case.id,
        "tool": failure.tool,
        "outcome": failure.outcome,
        "message": failure.message,
        "frame": _inside(failure.frame),
        "replay": failure.replay,
        "record": None if failure.record is None else _record(failure.record),
    }


def _waiver(waiver: Waiver, run: LaneRun) -> KnownFalse:
    state = {"dead": waiver in run.dead, "used": waiver in used(run.planted, run.tried)}
    return cast(KnownFalse, {**asdict(waiver), **state})


def _record(record: Record) -> Shown:
    parts = asdict(record) | {
        "source": _inside(record.source),
        "against": [_inside(place) for place in record.against],
    }
    return {name: value for name, value in parts.items() if value and name != "words"}


def _inside(place: str) -> str:
    """A place, relative to the suite's folder if it is in there."""
    return place.removeprefix(f"{ROOT}/")
