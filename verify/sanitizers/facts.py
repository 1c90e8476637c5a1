"""Five facts about one sanitized process, and the judgement that follows from them.

The facts are the exit code, the tool's summary, the records in its XML, the program's own results
(with outputs that were poison before each run), and the ledger of the kernels that it launched.  A
process is clean only if all five agree.  It is faulty if summary and records both show an error.
Anything else is inconclusive, which is no pass: the tool can have been missing, can have crashed,
or can have checked nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify.sanitizers.exceptions import WAIVERS, Waiver
from verify.sanitizers.ledger import Ledger
from verify.sanitizers.ledger import read as read_ledger
from verify.sanitizers.records import (
    NotUnderstood,
    Record,
    Summary,
    complaints,
    read_records,
    read_summary,
)
from verify.sanitizers.tool import ERROR_EXIT, LEDGER, LOG, PRINT_LIMIT, XML

POISON = "Poison"  # the kind of a record of this suite's own: bits that depend on poison


@dataclass(frozen=True)
class CaseResult:
    """The result of one case in the process.

    status: of its reply.  against: why its outputs do not prove a launch, or "".  Outputs hold
    poison before a run: if every element was replaced, the kernel did run on the device.
    differs: where a second run, over other poison in outputs and workspaces, has other bits, or "".
    """

    case: str
    status: str
    against: str = ""
    differs: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one process.

    exit_code: None if it had to be killed.  summary, records: None if they cannot be read.
    expected_cases: the number of its cases.  launches: None if the ledger cannot be read.  counted:
    whether each of its kernels must be in the ledger.  doubts: what cannot be read, and the tool's
    complaints.
    """

    tool: str
    exit_code: int | None
    summary: Summary | None
    records: tuple[Record, ...] | None
    results: tuple[CaseResult, ...]
    expected_cases: int
    launches: Ledger | None = None
    counted: bool = False
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
            records = read_records(texts[XML], tool, texts.get(LOG, ""))
        except NotUnderstood as error:
            doubts.append(str(error))
    return Facts(
        tool=tool,
        exit_code=exit_code,
        summary=summary,
        records=records,
        results=tuple(results),
        expected_cases=expected,
        launches=read_ledger(folder / LEDGER),
        doubts=tuple(doubts),
    )


def judge(facts: Facts, waivers: Sequence[Waiver] = WAIVERS) -> Judgement:
    """The judgement that follows from the facts."""
    judgement = _of_the_tool(facts, waivers)
    own = tuple(
        Record(tool=facts.tool, kind=POISON, level="Error", text=text, words=text)
        for result in facts.results
        if result.differs
        for text in [f"reads what it has not written: over other poison, {result.differs}"]
    )
    if not own:
        return judgement
    records = (*judgement.records, *own)
    return replace(judgement, outcome="faulty", records=records, total=judgement.total + len(own))


def _of_the_tool(facts: Facts, waivers: Sequence[Waiver]) -> Judgement:
    """The judgement without the bits of second runs."""
    doubts = list(facts.doubts)
    doubts += [
        f"a {record.kind} record holds unknown elements: {', '.join(record.unknown)}"
        for record in facts.records or ()
        if record.unknown
    ]
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
    doubts += case_doubts(facts)
    if doubts:
        return Judgement("inconclusive", tuple(doubts), uncovered, facts.summary.total, tuple(used))
    return Judgement("clean", (), (), 0, tuple(used))


def _exit_agrees(facts: Facts) -> bool:
    """Whether the exit code agrees with the summary: 0 without errors, else ERROR_EXIT; warnings do
    not count."""
    assert facts.summary is not None
    return facts.exit_code == (ERROR_EXIT if facts.summary.errors else 0)


def case_doubts(facts: Facts) -> list[str]:
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
    return doubts + (_ledger_doubts(facts) if facts.counted else [])


def _ledger_doubts(facts: Facts) -> list[str]:
    """Reasons from the ledger of launches why the process is not clean."""
    if facts.launches is None:
        return ["the process left no readable ledger of its launches"]
    doubts = [
        f"run {number} of {len(facts.launches)} launched no kernel, according to the ledger"
        for number, run in enumerate(facts.launches, 1)
        if not run
    ]
    if len(facts.launches) < len(facts.results):
        doubts.append(f"{len(facts.launches)} runs in the ledger, {len(facts.results)} cases run")
    return doubts


def _code(code: int | None) -> str:
    return "a kill" if code is None else f"exit code {code}"
