"""A planted fault: what it is, under which tools it is tried, and what of a judgement shows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verify.sanitizers.facts import Judgement
from verify.sanitizers.records import Record
from verify.sanitizers.tool import CONSAN, FPSAN, INSTRUMENTING, SKEW, TOOLS, Sanitizer

MANUAL = "NVIDIA Compute Sanitizer 2025.3.1"
# What each tool does not look at: the reason why it need not see the other tools' faults.
BLIND = {
    "memcheck": f"order of accesses, barriers and unwritten memory ({MANUAL}: Memcheck checks the"
    " address and the alignment of each access)",
    "racecheck": f"global memory, addresses and barriers that order nothing ({MANUAL}: Racecheck"
    " finds hazards between accesses to shared memory)",
    "initcheck": f"shared memory, and memory written before ({MANUAL}: Initcheck finds reads of"
    " global memory that nothing has written; shared memory only from 13.1 on)",
    "skew": "addresses, unwritten memory, and barriers whose absence changes no result (it compares"
    " the bits of results)",
    "consan": "registers, global memory and the order of warps of one partition (it models which"
    " partition may see a tile of shared or tensor memory, and each mbarrier)",
    "fpsan": "order, memory and rounding (it compares what is computed, in integers)",
    "synccheck": f"memory ({MANUAL}: Synccheck finds invalid uses of barriers and of wgmma)",
}


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """One planted kernel: `variant` of `file`.

    twin: it is right, and must be clean under every tool.  caught_by: the tools that must catch it.
    shows: regular expressions that a record of this fault matches, anywhere in its text and
    ignoring case.  unseen: why no tool sees it, if none does.  needs: the
    option without which no tool must catch it.  copy_of: the shipped variant that it
    is a known-bad copy of; it is left out where that cannot run.  spare: other copies show that the
    tools in `caught_by` are alive.  It is tried under these alone, and if they miss it, delays must
    show it (`verify.sanitizers.skew`).  by_triton: Triton compiles it, so that it is tried under
    its tools and with delays alone, but a twin under compute-sanitizer's, too; the other faults are
    not tried under Triton's tools.
    optional: it is left out where it cannot run.  cluster: its CTAs share a tile, and wait for each
    other at a barrier that ConSan does not know, so that it is tried with delays alone.  algebra:
    it is for FPSan alone, which compares it with a plain kernel.
    """

    variant: str
    file: Path
    about: str
    twin: bool = False
    caught_by: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    unseen: str = ""
    needs: str = ""
    copy_of: str = ""
    spare: bool = False
    by_triton: bool = False
    optional: bool = False
    cluster: bool = False
    algebra: bool = False

    def under(self, sanitizer: Sanitizer) -> PlantedFault:
        """The fault as that sanitizer must treat it."""
        if not self.needs or self.needs in sanitizer.offers:
            return self
        return replace(self, caught_by=(), unseen=f"that needs {self.needs}: a newer version")

    def wanted(self, tool: str) -> str:
        """The required result: "caught", "clean", or "any" if nothing is required of that tool."""
        if self.spare:
            return "any"
        return "clean" if self.twin else "caught" if tool in self.caught_by else "any"

    def tried_under(self, tools: Sequence[str]) -> tuple[str, ...]:
        """Those of the tools that it is tried under.  Delays are for faults that they can show."""
        if self.by_triton:
            own: tuple[str, ...] = (CONSAN, SKEW)
            if self.spare:
                own = self.caught_by
            elif self.algebra:
                own = (FPSAN,)
            elif self.cluster:
                own = (SKEW,)
            elif self.twin:
                own = (CONSAN, *TOOLS)
            return tuple(tool for tool in tools if tool in own)
        everywhere = not self.spare
        return tuple(
            tool
            for tool in tools
            if tool in self.caught_by
            or (everywhere and tool not in INSTRUMENTING and (tool != SKEW or self.twin))
        )

    def repeats_within(self, tool: str) -> bool:
        """Whether one process can try it several times, and tell each try from the others.

        A twin that is clean is clean in every try, and the suite's own comparisons of bits judge
        each case.  A record of another tool names no launch, and an error of memory ends the
        process.
        """
        return self.twin or tool in (SKEW, FPSAN)

    def held(self, tool: str, judgement: Judgement, tries: int) -> int:
        """In how many of the tries in one process the required result came."""
        if self.wanted(tool) == "caught" and self.repeats_within(tool):
            shown = sum(self._shows(record) for record in judgement.records)
            return min(shown, tries) if judgement.outcome == "faulty" else 0
        return tries if self.holds(tool, judgement) else 0

    def blind(self, tool: str) -> str:
        """Why the tool is not required to see the fault; "" where something is required of it."""
        if self.spare or self.wanted(tool) != "any":
            return ""
        return self.unseen or BLIND[tool]

    def shown_by(self, judgement: Judgement) -> Record | None:
        """The record that shows this fault, if there is one."""
        fitting = filter(self._shows, judgement.records)
        return next(fitting, None) if judgement.outcome == "faulty" else None

    def _shows(self, record: Record) -> bool:
        """Whether that record shows the fault, whatever else is in doubt."""
        said = f"{record.kind} {record.words}"
        return record.tool == SKEW or all(
            re.search(words, said, re.IGNORECASE) for words in self.shows
        )

    def holds(self, tool: str, judgement: Judgement) -> bool:
        """Whether the judgement is the required one."""
        wanted = self.wanted(tool)
        if wanted == "caught":
            return self.shown_by(judgement) is not None
        return wanted == "any" or judgement.outcome == "clean"
