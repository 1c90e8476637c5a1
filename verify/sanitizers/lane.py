"""The sanitizer lane: runs planted faults, then every variant, under every tool; and verdicts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TypeVar

from verify.cell.discovery import roster
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError
from verify.evidence import Finding, Outcome, Recorder, Verdict
from verify.judging.findings import Ruling
from verify.machine.cores import cores
from verify.problem.case import Case
from verify.problem.coverage import coverage_bins
from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.failures import Failure, failures, finding, replay
from verify.sanitizers.planted import PlantedFault, planted_problem
from verify.sanitizers.session import Booth, Session, Subject, rehearse
from verify.sanitizers.skew import race
from verify.sanitizers.tool import SKEW

K = TypeVar("K")
R = TypeVar("R")

GROUP = "sanitizer"
MAX_WORKERS = 8


@dataclass(frozen=True)
class PlantedSession:
    """A planted fault, and its session under one tool."""

    fault: PlantedFault
    session: Session

    @property
    def holds(self) -> bool:
        return self.fault.holds(self.session.tool, self.session.judgement)

    @property
    def shown(self) -> bool:
        """Whether a record shows the fault."""
        return self.fault.shown_by(self.session.judgement) is not None


@dataclass(frozen=True)
class TriedSubject:
    """A subject under one tool.

    sessions: first one with all its cases, then one for each case if that was necessary.
    outcomes: case id -> "clean", "faulty", "inconclusive" or "failed" (already in a plain cell).
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
        order = ("failed", "faulty", "inconclusive", "clean")
        return min(self.outcomes.values(), key=order.index, default="inconclusive")

    @property
    def records(self) -> int:
        return sum(session.judgement.total for session in self.sessions)

    @property
    def seconds(self) -> float:
        return sum(session.seconds for session in self.sessions)


@dataclass
class Lane:
    """Runs sessions in parallel and records verdicts.

    workers: sessions at the same time.  done: called after each session.
    """

    booth: Booth
    recorder: Recorder
    tools: tuple[str, ...]
    workers: int
    done: Callable[[Session], None] = lambda session: None
    _free: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for number in range(self.workers):
            self._free.put(number)

    # Planted faults.

    def plant(self, faults: tuple[PlantedFault, ...]) -> list[PlantedSession]:
        """Run every planted fault under its tools, and a spare copy that they miss with delays.
        Raises InfrastructureError if one cannot run."""
        subjects = _planted_subjects(faults)
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {
                pool.submit(
                    self._session, tool, subjects[fault.variant], f"planted-{fault.variant}"
                ): fault
                for fault, tool in _in_turn(faults, self.tools)
                if fault.variant in subjects
            }
            planted = [PlantedSession(fault, session) for fault, session in _results(futures)]
            caught = {each.fault.variant for each in planted if each.shown}
            missed = {
                pool.submit(self._session, SKEW, subjects[fault.variant], ""): fault
                for fault in faults
                if fault.spare and fault.variant in subjects and fault.variant not in caught
                if fault.tried_under(self.tools)
            }
            planted += [PlantedSession(fault, session) for fault, session in _results(missed)]
        order = (*self.tools, SKEW)
        return sorted(planted, key=lambda t: (faults.index(t.fault), order.index(t.session.tool)))

    # Kernels.

    def try_all(self, subjects: Iterable[Subject], environment: Environment) -> list[TriedSubject]:
        """Run each subject in a plain cell, then under every tool; results in their order."""
        fork_server = ForkServer(environment)
        try:
            with ThreadPoolExecutor(self.workers) as pool:
                futures = {
                    pool.submit(self._try, number, subject, fork_server): number
                    for number, subject in enumerate(subjects)
                }
                by_number = dict(_results(futures))
        finally:
            fork_server.close()
        return [tried for number in sorted(by_number) for tried in by_number[number]]

    def _try(self, number: int, subject: Subject, fork_server: ForkServer) -> list[TriedSubject]:
        for case in subject.cases:
            self.recorder.begin(case.id, "generate", case.variant)
        cell = Cell(fork_server)
        try:
            failing = rehearse(subject, cell)
        finally:
            cell.close()
        failed = tuple(
            self._failed(case, failing[case.id], subject)
            for case in subject.cases
            if case.id in failing
        )
        sane = replace(
            subject, cases=tuple(case for case in subject.cases if case.id not in failing)
        )
        told = dict.fromkeys(self.tools[:1], failed)  # no tool has run: once is enough
        return [
            self._under(tool, f"{number}", subject, sane, told.get(tool, ())) for tool in self.tools
        ]

    def _failed(self, case: Case, ruling: Ruling, subject: Subject) -> Failure:
        """Record a case that fails without a tool."""
        assert ruling.finding is not None
        message = f"without a sanitizer: {ruling.finding.message}"
        command = replay(case)
        moved = replace(ruling.finding, message=message, replay=command)
        self._record(subject, case, ruling.finding.oracle, moved, 0.0)
        return Failure(
            case=case,
            dtype=subject.dtype,
            tool="",
            outcome="failed",
            message=message,
            replay=command,
        )

    def _under(
        self,
        tool: str,
        name: str,
        subject: Subject,
        sane: Subject,
        failed: tuple[Failure, ...] = (),
    ) -> TriedSubject:
        outcomes = {case.id: "failed" for case in subject.cases}
        if not sane.cases:
            return TriedSubject(subject, tool, (), outcomes, failed)
        first = self._session(tool, sane, name)
        sessions = [first]
        of_case = {case.id: first for case in sane.cases}
        if first.judgement.outcome != "clean" and len(sane.cases) > 1:
            # Run every case in a separate process, to find the case that causes the record.
            for position, case in enumerate(sane.cases):
                sessions.append(self._session(tool, sane.alone(case), f"{name}-{position}"))
                of_case[case.id] = sessions[-1]
            if first.judgement.outcome == "faulty" and all(
                session.judgement.outcome == "clean" for session in of_case.values()
            ):
                of_case[_first_unanswered(first, sane).id] = first
        every = list(failed)
        for case in sane.cases:
            session = of_case[case.id]
            outcomes[case.id] = session.judgement.outcome
            mine: tuple[Failure, ...] = ()
            if session.judgement.outcome != "clean":
                shared = session is first and len(sane.cases) > 1
                mine = tuple(failures(case, sane, session, shared=shared))
            every += mine
            seconds = first.seconds / len(sane.cases)
            self._record(subject, case, tool, finding(mine, session.judgement.total), seconds)
        return TriedSubject(subject, tool, tuple(sessions), outcomes, tuple(every))

    def _session(self, tool: str, subject: Subject, name: str) -> Session:
        number = self._free.get()
        try:
            if tool == SKEW:
                session = race(self.booth.environment, subject)
            else:
                session = self.booth.sanitize(tool, subject, number, name)
        finally:
            self._free.put(number)
        self.done(session)
        return session

    def _record(
        self, subject: Subject, case: Case, oracle: str, finding: Finding | None, seconds: float
    ) -> None:
        outcome: Outcome = "pass" if finding is None else "fail"
        verdict = Verdict(
            case=case.id,
            variant=case.variant,
            config=case.config,
            dtype=subject.dtype,
            oracle=oracle,
            group=GROUP,
            outcome=outcome,
            phase="generate",
            problem=case.problem.name,
            seconds={"run": round(seconds, 3)},
            bins=tuple(sorted(coverage_bins(case.problem, subject.config))),
            finding=finding,
        )
        self.recorder.write(verdict)


def worker_count(workers: str) -> int:
    """The number of parallel processes: "auto" is one per two cores, at most MAX_WORKERS."""
    if workers != "auto":
        return max(1, int(workers))
    return max(1, min(MAX_WORKERS, cores() // 2))


def unused(waivers: Sequence[Waiver], tried: Sequence[TriedSubject]) -> list[Waiver]:
    """Waivers that covered no record of the run."""
    used = {waiver for t in tried for session in t.sessions for waiver in session.judgement.waived}
    return [waiver for waiver in waivers if waiver not in used]


def _in_turn(
    faults: Sequence[PlantedFault], tools: Sequence[str]
) -> list[tuple[PlantedFault, str]]:
    """Every fault with each tool that it is tried under, in the order in which sessions begin.

    First comes every fault under one tool, the last of them first (the copies of CuTe kernels,
    whose builds take longest); then under the others.  A session that needs a build of another
    would only wait for it, in a worker's place.
    """
    turns = [
        (turn, fault, tool)
        for fault in reversed(faults)
        for turn, tool in enumerate(fault.tried_under(tools))
    ]
    return [(fault, tool) for _, fault, tool in sorted(turns, key=lambda each: each[0])]


def _planted_subjects(faults: tuple[PlantedFault, ...]) -> dict[str, Subject]:
    subjects = {}
    loaded = roster(sorted({fault.file for fault in faults}))
    for failure in loaded.failures:
        raise InfrastructureError(f"{failure.ref} does not load: {failure.message}")
    declarations = {declaration.name: declaration for declaration in loaded.declarations}
    for fault in faults:
        if fault.variant not in declarations:
            raise InfrastructureError(f"{fault.file.name} has no variant {fault.variant}")
        declaration = declarations[fault.variant]
        if declaration.unavailable is not None and fault.copy_of:
            continue
        if declaration.unavailable is not None:
            raise InfrastructureError(f"{fault.variant} cannot run here: {declaration.unavailable}")
        problem = planted_problem(declaration)
        case = Case(declaration.ref, declaration.configs[0].name, GROUP, problem)
        subjects[fault.variant] = Subject(
            declaration, declaration.configs[0], problem.dtype, (case,)
        )
    return subjects


def _first_unanswered(session: Session, subject: Subject) -> Case:
    """The first case without a good reply, or else the last case."""
    answered = {result.case for result in session.facts.results if result.status == "ok"}
    return next((case for case in subject.cases if case.id not in answered), subject.cases[-1])


def _results(futures: dict[Future[R], K]) -> list[tuple[K, R]]:
    """The futures' results, in no fixed order.  If one raises, those that have not begun are
    cancelled."""
    try:
        return [(futures[future], future.result()) for future in as_completed(futures)]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
