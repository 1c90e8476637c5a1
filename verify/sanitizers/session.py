"""Session: some cases of one variant, one after the other in one sanitized process, and what came
of it."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify.cell.arena import Arena
from verify.cell.process import Cell, Environment, InfrastructureError
from verify.judging.findings import Ruling
from verify.judging.run_checks import held
from verify.judging.trial import Trial
from verify.problem.case import Case
from verify.sanitizers.facts import WAIVERS, Facts, Heard, Judgement, Waiver, collect, judge
from verify.sanitizers.process import Ended, SanitizedCell
from verify.sanitizers.tool import WORDS, Sanitizer
from verify.variant import Config, Declaration


@dataclass(frozen=True)
class Subject:
    """What is tried together: one variant, config and dtype, and its cases."""

    declaration: Declaration
    config: Config
    dtype: str
    cases: tuple[Case, ...]

    @property
    def id(self) -> str:
        return "-".join((self.declaration.ref, self.config.name, self.dtype))

    def alone(self, case: Case) -> Subject:
        """The same with one case only."""
        return replace(self, cases=(case,))


@dataclass(frozen=True)
class Session:
    """One process, over: its tool, subject, judgement and wall time in seconds."""

    tool: str
    subject: Subject
    judgement: Judgement
    seconds: float
    facts: Facts = field(repr=False)


@dataclass
class Booth:
    """Where sessions happen: the tool, the environment of kernels, and a folder for what the tool
    writes."""

    sanitizer: Sanitizer
    environment: Environment
    folder: Path
    waivers: tuple[Waiver, ...] = WAIVERS

    def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
        """Run a subject's cases in one process under a tool.  `lane`: a number no other session has
        now; `name`: unique."""
        folder = (self.folder / tool / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = time.perf_counter()
        cell = SanitizedCell(self.environment, self.sanitizer.command(tool, folder, lane))
        arena = Arena()
        heard: list[Heard] = []
        doubt = ""
        try:
            for case in subject.cases:
                heard.append(_heard(case, subject, cell, arena)[0])
        except Ended:
            pass  # the tool may have ended it at its first error; how many cases were heard tells
        except InfrastructureError as error:
            doubt = str(error)
        finally:
            code = cell.finish()
            words = cell.words
            cell.close()
            arena.close()
        (folder / WORDS).write_text(words, encoding="utf-8")
        facts = collect(tool, folder, code, heard, len(subject.cases))
        if doubt:
            facts = replace(facts, doubts=(f"{doubt}: {words[-500:]}", *facts.doubts))
        return Session(
            tool, subject, judge(facts, self.waivers), time.perf_counter() - begun, facts
        )


def rehearse(subject: Subject, cell: Cell) -> dict[str, Ruling]:
    """Run a subject's cases in a plain cell, which fills the compilers' caches; the rulings of
    those that fail, by case id."""
    arena = Arena()
    try:
        found = {case.id: _heard(case, subject, cell, arena)[1] for case in subject.cases}
    finally:
        arena.close()
    return {id_: ruling for id_, ruling in found.items() if ruling.finding is not None}


def _heard(case: Case, subject: Subject, cell: Cell, arena: Arena) -> tuple[Heard, Ruling]:
    """Run one case and say what it did, and what every run must hold
    (`verify.judging.run_checks`)."""
    entry = "backward" if "backward" in subject.declaration.entries else "forward"
    trial = Trial(
        subject.declaration, subject.config, case.problem, cell, arena, arch="", entry=entry
    )
    for _, run, ruling in held(trial):
        if ruling.finding is not None:
            return Heard(case.id, run.reply.status, ruling.finding.message), ruling
    written = sum(tensor.numel() for tensor in trial.first.outputs.values())
    return Heard(case.id, "ok", "" if written else "its outputs have no element"), Ruling()
