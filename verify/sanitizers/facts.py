"""Five facts about one sanitized process, and the judgement that follows from them.

The facts are the exit code, the tool's summary, the records in its XML, the replies of the program,
and the outputs of its kernels.  A process is clean only if all five agree.  It is faulty if summary
and records both show an error.  Anything else is inconclusive, which is no pass: the tool can have
been missing, can have crashed, or can have checked nothing.
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
class CaseResult:
    """The result of one case in the process.

    status: of its reply.  against: why its outputs do not prove a launch, or "".  Outputs hold
    poison before a run: if every element was replaced, the kernel did run on the device.
    """

    case: str
    status: str
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A record that is known to be false.

    Matching records of that tool and kind do not count.  A waiver that matches nothing in a
    complete run is dead, and the run fails.  kernel, words: regular expressions that are searched
    in the record's fields of these names.  proof: how it was shown that the tool is wrong.
    """

    tool: str
    kind: str
    kernel: str
    words: str
    reason: str
    proof: str

    def covers(self, record: Record) -> bool:
        """Whether the waiver matches the record; never if the record has unknown elements."""
        return (
            (self.tool, self.kind) == (record.tool, record.kind)
            and not record.unknown
            and re.search(self.kernel, record.kernel) is not None
            and re.search(self.words, record.words) is not None
        )


WAIVERS: tuple[Waiver, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one process.

    exit_code: None if it had to be killed.  summary, records: None if they cannot be read.
    expected_cases: the number of its cases.  doubts: what cannot be read, and the tool's
    complaints.
    """

    tool: str
    exit_code: int | None
    summary: Summary | None
    records: tuple[Record, ...] | None
    results: tuple[CaseResult, ...]
    expected_cases: int
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """The judgement of one process.

    outcome: "clean", "faulty" or "inconclusive".  reasons: why it is inconclusive, or doubts about
    a faulty process.  records: those that no waiver covers.  total: errors and warnings that the
    tool counted.  waived: the waivers that were used.
    """

    outcome: str
    reasons: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    total: int = 0
    waived: tuple[Waiver, ...] = field(default_factory=tuple)


def collect(
    tool: str, folder: Path, exit_code: int | None, results: Sequence[CaseResult], expected: int
) -> Facts:
    """Read the tool's files in a process's folder."""
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
        results=tuple(results),
        expected_cases=expected,
        doubts=tuple(doubts),
    )


def judge(facts: Facts, waivers: Sequence[Waiver] = WAIVERS) -> Judgement:
    """The judgement that follows from the facts."""
    doubts = list(facts.doubts)
    if facts.summary is None or facts.records is None:
        return Judgement("inconclusive", tuple(doubts) or ("the tool left nothing readable",))
    used = [waiver for waiver in waivers if any(waiver.covers(record) for record in facts.records)]
    uncovered = tuple(
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
    if uncovered and facts.summary.total:
        # In spite of other doubts: both the summary and the records show a fault.
        return Judgement("faulty", tuple(doubts), uncovered, facts.summary.total, tuple(used))
    if used and facts.summary.total > len(facts.records):
        doubts.append(
            f"{facts.summary.total - len(facts.records)} errors beyond the print limit cannot be"
            " waived unseen"
        )
    doubts += _case_doubts(facts)
    if doubts:
        return Judgement("inconclusive", tuple(doubts), uncovered, facts.summary.total, tuple(used))
    return Judgement("clean", (), (), 0, tuple(used))


def _exit_agrees(facts: Facts) -> bool:
    """Whether the exit code agrees with the summary: 0 without errors, else ERROR_EXIT; warnings do
    not count."""
    assert facts.summary is not None
    return facts.exit_code == (ERROR_EXIT if facts.summary.errors else 0)


def _case_doubts(facts: Facts) -> list[str]:
    """Reasons from the cases' results why the process is not clean."""
    if facts.expected_cases < 1:
        return ["it had no case to run"]
    doubts = (
        []
        if len(facts.results) == facts.expected_cases
        else [f"{len(facts.results)} of {facts.expected_cases} cases were run"]
    )
    for result in facts.results:
        if result.status != "ok":
            doubts.append(f"{result.case}: {result.status}: {result.against}")
        elif result.against:
            doubts.append(f"{result.case}: its outputs do not prove a launch: {result.against}")
    return doubts


def _code(code: int | None) -> str:
    return "a kill" if code is None else f"exit code {code}"
