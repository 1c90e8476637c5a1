"""Planted faults: kernels that are known to be wrong, and correct twins, tried in every run.

They are treated exactly like other kernels: the same program, tool, options and reading of its
files.  If a tool misses a fault that it must catch, or convicts a twin, its run proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from verify.bundle import ROOT
from verify.problem import Problem
from verify.sanitizers.facts import Judgement
from verify.sanitizers.records import Record
from verify.variant import Declaration

FOLDER = ROOT / "tests" / "planted"


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """One planted kernel: `variant` of `file`.

    caught_by: the tools that must catch it; () for a twin, which must be clean under every tool.
    shows: regular expressions that a record of this fault matches, anywhere in its text and
    ignoring case.
    """

    variant: str
    file: Path
    about: str
    caught_by: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()

    @property
    def twin(self) -> bool:
        return not self.caught_by

    def wanted(self, tool: str) -> str:
        """The required result: "caught", "clean", or "any" if nothing is required of that tool."""
        return "clean" if self.twin else "caught" if tool in self.caught_by else "any"

    def shown_by(self, judgement: Judgement) -> Record | None:
        """The record that shows this fault, if there is one."""
        fitting = (
            record
            for record in judgement.records
            if all(
                re.search(words, f"{record.kind} {record.words}", re.IGNORECASE)
                for words in self.shows
            )
        )
        return next(fitting, None) if judgement.outcome == "faulty" else None

    def holds(self, tool: str, judgement: Judgement) -> bool:
        """Whether the judgement is the required one."""
        wanted = self.wanted(tool)
        if wanted == "caught":
            return self.shown_by(judgement) is not None
        return wanted == "any" or judgement.outcome == "clean"


def planted_problem(declaration: Declaration) -> Problem:
    """A contiguous problem with a ragged last tile in both lengths and several KV tiles, for a
    planted kernel."""
    support = declaration.support
    return Problem(
        heads_q=2,
        heads_kv=2,
        seqlen_q=203,
        seqlen_kv=203,
        head_dim=min(support.head_dims),
        dtype=support.dtypes[0],
        seed=1,
    )


_WRITE, _READ, _RACE = r"\bwrite\b", r"\bread\b", r"\brace\b|\bhazard\b"
_TINY, _SPLIT_Q = FOLDER / "tiny.py", FOLDER / "split_q.py"

FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault(variant="planted-correct", file=_TINY, about="a small kernel without a fault"),
    PlantedFault(
        variant="planted-overrun",
        file=_TINY,
        about="writes the element behind the last one of O",
        caught_by=("memcheck",),
        shows=("planted_overrun", _WRITE),
    ),
    PlantedFault(
        variant="planted-overread",
        file=_TINY,
        about="reads the element behind the last one of Q",
        caught_by=("memcheck",),
        shows=("planted_overread", _READ),
    ),
    PlantedFault(
        variant="planted-missing-barrier",
        file=_TINY,
        about="reads what other warps wrote to shared memory, with no barrier between",
        caught_by=("racecheck",),
        shows=("planted_missing_barrier", _RACE),
    ),
    PlantedFault(
        variant="planted-split-q-overrun",
        file=_SPLIT_Q,
        about="kernels/ptx/split_q.cu, one row too many written: < became <=",
        caught_by=("memcheck",),
        shows=("split_q", _WRITE),
    ),
    PlantedFault(
        variant="planted-split-q-missing-barrier",
        file=_SPLIT_Q,
        about="kernels/ptx/split_q.cu without the barrier between the copy of V and its use",
        caught_by=("racecheck",),
        shows=("cp_async", "ldmatrix", _RACE),  # racecheck names the inlined functions
    ),
)
