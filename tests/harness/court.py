"""Kernels from a text, loaded and judged as a campaign does it: in a cell, by every oracle of a
group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import Roster, roster
from verify.evidence import Recorder, Verdict
from verify.problem import Problem
from verify.variant import Declaration


@dataclass(frozen=True)
class Court:
    judge: Judge
    roster: Roster

    def declaration(self, name: str) -> Declaration:
        return next(d for d in self.roster.declarations if d.name == name)

    def verdicts(self, name: str, group: str, problem: Problem) -> dict[str, Verdict]:
        """Verdicts by oracle."""
        declaration = self.declaration(name)
        target = Target(declaration, declaration.configs[0], problem.dtype, group)
        return {v.oracle: v for v in self.judge.judge(target, problem)}

    def convicted(self, name: str, group: str, text: str) -> dict[str, str]:
        """Messages of the oracles that convict it."""
        found = self.verdicts(name, group, Problem.parse(text))
        return {o: v.finding.message for o, v in found.items() if v.outcome == "fail" and v.finding}


@contextmanager
def court_of(folder: Path, **files: str) -> Iterator[Court]:
    """A court of the kernels in these texts, which become files of `folder`."""
    paths = [folder / f"{name}.py" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    judge = Judge(Recorder(folder, "main"))
    try:
        yield Court(judge, roster(paths, judge.fork_server))
    finally:
        judge.close()
