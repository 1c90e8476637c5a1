"""Five facts about one sanitized process, and what they say together.

The exit code, the tool's own summary, the records in its XML, the replies of the program inside,
and the outputs that its kernels wrote: a process is clean, or faulty, only where all five agree.
Anything else is inconclusive, which is no pass: the tool may not have been there, may have died, or
may have looked at nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verify.sanitizers.records import (
    NotUnderstood,
    Record,
    Summary,
    complaints,
    read_records,
    read_summary,
)
from verify.sanitizers.tool import ERROR_EXIT, LOG, PRINT_LIMIT, XML


@dataclass(frozen=True)
class Heard:
    """What one case did inside the process: its reply's status, and what speaks against it, if
    anything does.

    Outputs are poison before a run; where every element was replaced, the kernel did run on the
    device.
    """

    case: str
    status: str
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A record that is known to be false.  Records of that tool and kind that match count as none;
    a waiver that matches nothing in a whole run is dead, and fails it.  kernel and words: regular
    expressions, searched in the record's. proof: how it was shown that the tool is wrong."""

    tool: str
    kind: str
    kernel: str
    words: str
    reason: str
    proof: str

    def covers(self, record: Record) -> bool:
        """Whether it is about that record; never about one with elements that nobody has read."""
        return (
            (self.tool, self.kind) == (record.tool, record.kind)
            and not record.unknown
            and re.search(self.kernel, record.kernel) is not None
            and re.search(self.words, record.words) is not None
        )


WAIVERS: tuple[Waiver, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of one process.  exit_code: None if it had to be killed; summary and records:
    None if not understood.

    wanted: cases that it was given.  doubts: what could not be read, and the tool's own complaints.
    """

    tool: str
    exit_code: int | None
    summary: Summary | None
    records: tuple[Record, ...] | None
    heard: tuple[Heard, ...]
    wanted: int
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """outcome: "clean", "faulty" or "inconclusive"; reasons: why it is inconclusive, or what a
    faulty process leaves in doubt.

    records: those that no waiver covers.  total: how many errors the tool counted; waived: waivers
    that were used.
    """

    outcome: str
    reasons: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    total: int = 0
    waived: tuple[Waiver, ...] = field(default_factory=tuple)


def collect(
    tool: str, folder: Path, exit_code: int | None, heard: Sequence[Heard], wanted: int
) -> Facts:
    """Read what a process left in its folder."""
    doubts: list[str] = []
    texts: dict[str, str] = {}
    for name in (LOG, XML):
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            doubts.append(f"the tool left no {name}")
    summary: Summary | None = None
    records: tuple[Record, ...] | None = None
    if LOG in texts:
        doubts += complaints(texts[LOG])
        try:
            summary = read_summary(texts[LOG], tool)
        except NotUnderstood as error:
            doubts.append(str(error))
    if XML in texts:
        try:
            records = read_records(texts[XML], tool)
        except NotUnderstood as error:
            doubts.append(str(error))
    return Facts(
        tool=tool,
        exit_code=exit_code,
        summary=summary,
        records=records,
        heard=tuple(heard),
        wanted=wanted,
        doubts=tuple(doubts),
    )


def judge(facts: Facts, waivers: Sequence[Waiver] = WAIVERS) -> Judgement:
    """What the facts say together."""
    doubts = list(facts.doubts)
    if facts.summary is None or facts.records is None:
        return Judgement("inconclusive", tuple(doubts) or ("nothing of it could be read",))
    used = [waiver for waiver in waivers if any(waiver.covers(record) for record in facts.records)]
    left = tuple(
        record for record in facts.records if not any(waiver.covers(record) for waiver in used)
    )
    if (
        len(facts.records) < min(facts.summary.total, PRINT_LIMIT)
        or len(facts.records) > facts.summary.total
    ):
        doubts.append(
            f"the summary counts {facts.summary.total}, the XML holds {len(facts.records)} records"
        )
    if not _exit_agrees(facts):
        doubts.append(
            f"it ended with {_code(facts.exit_code)}; the summary counts {facts.summary.errors}"
            " errors"
        )
    if left and facts.summary.total:
        # Whatever else is in doubt, the tool has shown a fault in two ways.
        return Judgement("faulty", tuple(doubts), left, facts.summary.total, tuple(used))
    if used and facts.summary.total > len(facts.records):
        doubts.append(
            f"{facts.summary.total - len(facts.records)} errors beyond the print limit cannot be"
            " waived unseen"
        )
    doubts += _unheard(facts)
    if doubts:
        return Judgement("inconclusive", tuple(doubts), left, facts.summary.total, tuple(used))
    return Judgement("clean", (), (), 0, tuple(used))


def _exit_agrees(facts: Facts) -> bool:
    """0 without errors, warnings aside; ERROR_EXIT with some."""
    assert facts.summary is not None
    return facts.exit_code == (ERROR_EXIT if facts.summary.errors else 0)


def _unheard(facts: Facts) -> list[str]:
    """What the program inside says against a clean process."""
    if facts.wanted < 1:
        return ["it was given no case"]
    found = (
        []
        if len(facts.heard) == facts.wanted
        else [f"{len(facts.heard)} of {facts.wanted} cases were heard"]
    )
    for heard in facts.heard:
        if heard.status != "ok":
            found.append(f"{heard.case}: {heard.status}: {heard.against}")
        elif heard.against:
            found.append(f"{heard.case}: its outputs do not prove a launch: {heard.against}")
    return found


def _code(code: int | None) -> str:
    return "a kill" if code is None else f"exit code {code}"
