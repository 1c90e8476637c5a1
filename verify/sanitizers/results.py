"""What sessions have shown: of a planted fault, of a subject in a plain cell, and under a tool.

A subject whose builds are long is tried in parts, one for each case, and its results are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from verify.judging.findings import Ruling
from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.failures import Failure
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.session import NOT_RUN, Session, Subject
from verify.sanitizers.tool import INSTRUMENTING
from verify.variant import Declaration

_LONG_BUILDS = frozenset({"cute"})  # families whose kernels take a minute to compile


@dataclass(frozen=True)
class PlantedSession:
    """A planted fault, and its session under one tool."""

    fault: PlantedFault
    session: Session

    @property
    def tries(self) -> int:
        """How many times its process was to run it."""
        return len(self.session.subject.cases)

    @property
    def held(self) -> int:
        """In how many of them the required result came."""
        return self.fault.held(self.session.tool, self.session.judgement, self.tries)

    @property
    def holds(self) -> bool:
        """Whether it came in every one of them."""
        return self.held == self.tries

    @property
    def shown(self) -> bool:
        """Whether a record shows the fault, or a hang shows that of a copy: the shipped kernel
        answers."""
        return self.hangs or self.fault.shown_by(self.session.judgement) is not None

    @property
    def hangs(self) -> bool:
        """Whether it is a known-bad copy that does not answer before its deadline."""
        return bool(self.fault.copy_of) and self.session.hang is not None


def not_alive(tools: Sequence[str], planted: Sequence[PlantedSession]) -> set[str]:
    """Those of the tools that planted kernels do not show to be alive: that missed a fault or
    convicted a twin, and, of Triton's tools, those for which no planted fault could be built
    here."""
    dead = {each.session.tool for each in planted if not each.holds}
    tools_of = ((each.session.tool, each.fault) for each in planted)
    shown = {tool for tool, fault in tools_of if fault.wanted(tool) == "caught"}
    return dead | {tool for tool in tools if tool in INSTRUMENTING and tool not in shown}


@dataclass(frozen=True)
class TriedSubject:
    """A subject under one tool.

    sessions: first one with all its cases, then one for each case if that was necessary.
    outcomes: case id -> "clean", "faulty", "inconclusive", "failed" (already in a plain cell) or
    "not run".
    failures: one for each record, inconclusive case or failed case.
    """

    subject: Subject
    tool: str
    sessions: tuple[Session, ...]
    outcomes: dict[str, str]
    failures: tuple[Failure, ...] = ()

    @property
    def outcome(self) -> str:
        """The worst outcome of its cases."""
        order = ("failed", "faulty", "inconclusive", NOT_RUN, "clean")
        return min(self.outcomes.values(), key=order.index, default="inconclusive")

    @property
    def records(self) -> int:
        return sum(session.judgement.total for session in self.sessions)

    @property
    def seconds(self) -> float:
        return sum(session.seconds for session in self.sessions)


@dataclass(frozen=True)
class Rehearsed:
    """A subject after its cases have run in a plain cell.

    number: its place in the results.  failing: case id -> ruling.  failures: of these.
    not_run: why it was not rehearsed to its end, or "".
    """

    number: int
    subject: Subject
    failing: Mapping[str, Ruling]
    failures: tuple[Failure, ...] = ()
    not_run: str = ""

    @property
    def sane(self) -> Subject:
        """The subject with those cases that do not fail."""
        cases = tuple(case for case in self.subject.cases if case.id not in self.failing)
        return replace(self.subject, cases=cases)


def used(planted: Sequence[PlantedSession], tried: Sequence[TriedSubject]) -> set[Waiver]:
    """The waivers that covered a record of the run."""
    sessions = [each.session for each in planted] + [s for each in tried for s in each.sessions]
    return {waiver for session in sessions for waiver in session.judgement.waived}


def unused(
    waivers: Sequence[Waiver], planted: Sequence[PlantedSession], tried: Sequence[TriedSubject]
) -> list[Waiver]:
    """Waivers that covered no record of the run, and had to: what shows it was tried, if there is
    such a twin."""
    found = used(planted, tried)
    twins = {(each.fault.variant, each.session.tool) for each in planted}
    return [
        waiver
        for waiver in waivers
        if waiver not in found and (not waiver.shown_by or (waiver.shown_by, waiver.tool) in twins)
    ]


def long_first(declaration: Declaration) -> tuple[bool, bool]:
    """A key that sorts variants: long builds first, then backwards, which start more kernels."""
    return declaration.family not in _LONG_BUILDS, "backward" not in declaration.entries


def parts(subject: Subject) -> list[Subject]:
    """A subject as what one process runs: where builds are long, each case has its own, so that
    they are built side by side."""
    if subject.declaration.family not in _LONG_BUILDS:
        return [subject]
    return [subject.alone(case) for case in subject.cases]


def whole(parted: Iterable[tuple[int, Subject]]) -> dict[int, Subject]:
    """The subjects that `parts` has parted, by number."""
    found: dict[int, Subject] = {}
    for number, part in parted:
        cases = (*found[number].cases, *part.cases) if number in found else part.cases
        found[number] = replace(part, cases=cases)
    return found


def merged(one: TriedSubject, other: TriedSubject) -> TriedSubject:
    """Two parts of a subject under one tool."""
    failures = dict.fromkeys((*one.failures, *other.failures))
    outcomes = {**one.outcomes, **other.outcomes}
    ids = [case.id for case in one.subject.cases]
    return replace(
        one,
        sessions=(*one.sessions, *other.sessions),
        outcomes={id_: outcomes[id_] for id_ in ids if id_ in outcomes},
        failures=tuple(failures),
    )
