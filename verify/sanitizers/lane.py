"""The sanitizer lane: runs planted faults, then every variant, under every tool; and verdicts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from verify.cell.discovery import roster
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError
from verify.evidence import Finding, Outcome, Recorder, Verdict
from verify.judging.findings import Ruling
from verify.problem.case import Case
from verify.problem.coverage import coverage_bins
from verify.sanitizers import algebra, instrumented
from verify.sanitizers.course import Course
from verify.sanitizers.failures import Failure, failures, finding, replay
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.planted import planted_problem
from verify.sanitizers.results import (
    PlantedSession,
    Rehearsed,
    TriedSubject,
    long_first,
    merged,
    parts,
    whole,
)
from verify.sanitizers.session import NOT_RUN, Booth, Session, Subject, never_run, rehearse
from verify.sanitizers.skew import race
from verify.sanitizers.tool import ALL, FPSAN, INSTRUMENTING, SKEW, TOOLS
from verify.sanitizers.turns import in_turn, repeated
from verify.variant import Declaration

K = TypeVar("K")
R = TypeVar("R")

GROUP = "sanitizer"


@dataclass
class Lane:
    """Runs sessions in parallel and records verdicts.

    workers: processes at the same time.  done: called after each session.  repeat: how many times
    each planted kernel is tried under a tool of which something is required.  planted, tried:
    results so far.
    """

    booth: Booth
    recorder: Recorder
    tools: tuple[str, ...]
    workers: int
    done: Callable[[Session], None] = lambda session: None
    course: Course = field(default_factory=Course)
    repeat: int = 1
    planted: list[PlantedSession] = field(default_factory=list)
    tried: list[TriedSubject] = field(default_factory=list)
    _subjects: dict[str, Subject] = field(default_factory=dict)  # of planted faults
    _free: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for number in range(self.workers):
            self._free.put(number)

    # Planted faults.

    def plant(self, faults: tuple[PlantedFault, ...]) -> list[PlantedSession]:
        """Run every planted fault under its tools.  Raises InfrastructureError if one cannot
        run."""
        faults = tuple(fault for fault in faults if fault.tried_under(self.tools))
        with self.course.process("builds", "loading the planted kernels"):
            self._subjects = _planted_subjects(faults)
        turns = [
            (fault, tool)
            for fault, tool in in_turn(faults, self.tools)
            if fault.variant in self._subjects
        ]
        return self._plant_all(turns)

    def delay(self) -> list[PlantedSession]:
        """Run every spare copy that `plant` has tried, and no tool has caught, with delays."""
        caught = {each.fault.variant for each in self.planted if each.shown}
        tried = dict.fromkeys(each.fault for each in self.planted)
        missed = [
            fault
            for fault in tried
            if fault.spare and fault.variant not in caught and SKEW not in fault.caught_by
        ]
        return self._plant_all([(fault, SKEW) for fault in missed])

    def _plant_all(self, turns: Sequence[tuple[PlantedFault, str]]) -> list[PlantedSession]:
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {
                pool.submit(self._plant, tool, fault, again, tries): fault
                for again, fault, tool, tries in repeated(turns, self.repeat)
            }
            for fault, session in _results(futures):
                self.planted.append(PlantedSession(fault, session))
        order = list(self._subjects)
        self.planted = sorted(
            self.planted,
            key=lambda each: (
                order.index(each.fault.variant),
                ALL.index(each.session.tool),
            ),
        )
        return self.planted

    def _plant(self, tool: str, fault: PlantedFault, again: int, tries: int) -> Session:
        stage = "delays" if tool == SKEW and fault.spare else "copies" if fault.copy_of else ""
        name = f"planted-{fault.variant}" + (f"-again{again}" if again else "")
        subject = self._subjects[fault.variant]
        if tries > 1:
            subject = subject.times(tries)
        return self._session(tool, subject, name, stage or "planted")

    # Kernels.

    def rehearse(
        self, subjects: Iterable[tuple[int, Subject]], environment: Environment
    ) -> list[Rehearsed]:
        """Run each numbered subject in a plain cell, which builds its kernels; results by
        number."""
        fork_server = ForkServer(environment)
        try:
            with ThreadPoolExecutor(self.workers) as pool:
                futures = {
                    pool.submit(self._rehearse, part, fork_server): (number, part)
                    for number, subject in subjects
                    for part in parts(subject)
                }
                found = _results(futures)
        finally:
            fork_server.close()
        rehearsed = []
        for number, subject in sorted(whole(futures.values()).items()):
            mine = [result for (whose, _), result in found if whose == number]
            failing = {id_: ruling for result, _ in mine for id_, ruling in result.items()}
            failures = tuple(
                self._failed(case, failing[case.id], subject)
                for case in subject.cases
                if case.id in failing
            )
            not_run = next((reason for _, reason in mine if reason), "")
            rehearsed.append(Rehearsed(number, subject, failing, failures, not_run))
        return rehearsed

    def _rehearse(self, subject: Subject, fork_server: ForkServer) -> tuple[dict[str, Ruling], str]:
        """Case id -> ruling of those that fail; and why it was not run to its end, or ""."""
        worker = self._free.get()
        try:
            if reason := self.course.over():
                return {}, reason
            with self.course.process("builds", f"a first run of {subject.declaration.ref}"):
                for case in subject.cases:
                    self.recorder.begin(case.id, "generate", case.variant)
                cell = Cell(fork_server)
                try:
                    failing = rehearse(subject, cell)
                except InfrastructureError:
                    if reason := self.course.over():
                        return {}, reason
                    raise
                finally:
                    cell.close()
        finally:
            self._free.put(worker)
        reason = self.course.over()
        return ({}, reason) if reason and failing else (failing, "")

    def try_all(self, rehearsed: Sequence[Rehearsed]) -> list[TriedSubject]:
        """Run each subject under every tool; results in their order."""
        longest = sorted(rehearsed, key=lambda one: long_first(one.subject.declaration))
        slow_tools_first = sorted(self.tools, key=lambda tool: tool != SKEW)
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {
                pool.submit(self._under, tool, f"{one.number}", part, one): (one.number, tool)
                for tool in slow_tools_first
                for one in (_for_tool(tool, each) for each in longest)
                if one.subject.cases and excludes(tool, one.subject.declaration) is None
                for part in _parts_under(tool, one.sane)
            }
            found: dict[tuple[int, str], TriedSubject] = {}
            for key, tried in _results(futures, self.tried.append):
                found[key] = merged(found[key], tried) if key in found else tried
        pairs = [(one.number, tool) for one in rehearsed for tool in self.tools]
        self.tried = [found[pair] for pair in pairs if pair in found]
        return self.tried

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

    def _under(self, tool: str, name: str, sane: Subject, rehearsed: Rehearsed) -> TriedSubject:
        """Try those cases of a subject that ran without a tool, or a part of them."""
        subject, failing = rehearsed.subject, rehearsed.failing
        if rehearsed.not_run:
            session = never_run(tool, subject, rehearsed.not_run)
            outcomes = {case.id: NOT_RUN for case in subject.cases}
            return TriedSubject(subject, tool, (session,), outcomes)
        outcomes = {case.id: "failed" for case in subject.cases if case.id in failing}
        # No tool has run where it failed: once is enough.
        here = [each for each in self.tools if excludes(each, subject.declaration) is None]
        every = list(rehearsed.failures) if tool == here[0] else []
        if not sane.cases:
            return TriedSubject(subject, tool, (), outcomes, tuple(every))
        if sane.cases != rehearsed.sane.cases:
            name = f"{name}-part{rehearsed.sane.cases.index(sane.cases[0])}"
        first = self._session(tool, sane, name, "variants")
        sessions = [first]
        of_case = {case.id: first for case in sane.cases}
        if _alone_tells_more(first, sane):
            # Run every case in a separate process, to find the case that causes the record.
            for position, case in enumerate(sane.cases):
                sessions.append(
                    self._session(tool, sane.alone(case), f"{name}-{position}", "variants")
                )
                of_case[case.id] = sessions[-1]
            if first.judgement.outcome == "faulty" and all(
                session.judgement.outcome == "clean" for session in of_case.values()
            ):
                of_case[_first_unanswered(first, sane).id] = first
        for case in sane.cases:
            session = of_case[case.id]
            outcomes[case.id] = session.judgement.outcome
            if session.judgement.outcome == NOT_RUN:
                continue
            mine: tuple[Failure, ...] = ()
            if session.judgement.outcome != "clean":
                shared = session is first and len(sane.cases) > 1
                mine = tuple(failures(case, sane, session, shared=shared))
            every += mine
            seconds = first.seconds / len(sane.cases)
            self._record(subject, case, tool, finding(mine, session.judgement.total), seconds)
        return TriedSubject(subject, tool, tuple(sessions), outcomes, tuple(every))

    def _session(self, tool: str, subject: Subject, name: str, stage: str) -> Session:
        worker = self._free.get()
        try:
            if reason := self.course.over():
                return never_run(tool, subject, reason)
            with self.course.process(stage, f"{tool} on {subject.declaration.ref}"):
                if tool in TOOLS:
                    session = self.booth.sanitize(tool, subject, worker, name)
                else:
                    session = self._own(tool, subject, self.booth.folder / tool / name)
        finally:
            self._free.put(worker)
        if session.built:
            self.course.took("builds", session.built)
        if session.judgement.outcome != "clean" and (reason := self.course.over()):
            session = session.not_run(f"{reason} while it was under way")
        self.done(session)
        return session

    def _own(self, tool: str, subject: Subject, folder: Path) -> Session:
        """A session under a tool that needs no compute-sanitizer."""
        if tool == SKEW:
            return race(self.booth.environment, subject, folder=folder)
        return instrumented.sanitize(tool, self.booth.environment, subject, folder)

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


def excludes(tool: str, declaration: Declaration) -> str | None:
    """Why a variant is not tried under that tool, or None."""
    return instrumented.excludes(tool, declaration) if tool in INSTRUMENTING else None


def _parts_under(tool: str, sane: Subject) -> list[Subject]:
    """What one process each runs under a tool: one case where builds take long and differ."""
    if tool == FPSAN:
        return [sane.alone(case) for case in sane.cases] or [sane]
    return parts(sane) if tool == SKEW and sane.cases else [sane]


def _for_tool(tool: str, rehearsed: Rehearsed) -> Rehearsed:
    """Those cases of a subject that the tool can judge: for FPSan, not all."""
    if tool != FPSAN:
        return rehearsed
    subject = rehearsed.subject
    here = subject.declaration, subject.config
    cases = tuple(case for case in subject.cases if algebra.comparable(*here, case.problem))
    return replace(rehearsed, subject=replace(subject, cases=cases))


def _planted_subjects(faults: tuple[PlantedFault, ...]) -> dict[str, Subject]:
    subjects = {}
    loaded = roster(sorted({fault.file for fault in faults}))
    for failure in loaded.failures:
        raise InfrastructureError(f"{failure.ref} does not load: {failure.message}")
    declarations = {declaration.name: declaration for declaration in loaded.declarations}
    for fault in faults:
        if fault.variant not in declarations and fault.optional:  # without Triton
            continue
        if fault.variant not in declarations:
            raise InfrastructureError(f"{fault.file.name} has no variant {fault.variant}")
        declaration = declarations[fault.variant]
        if declaration.unavailable is not None and (fault.copy_of or fault.optional):
            continue
        if declaration.unavailable is not None:
            raise InfrastructureError(f"{fault.variant} cannot run here: {declaration.unavailable}")
        problem = (
            algebra.problems(declaration, declaration.support.dtypes[0])[0]
            if fault.algebra
            else planted_problem(declaration)
        )
        case = Case(declaration.ref, declaration.configs[0].name, GROUP, problem)
        subjects[fault.variant] = Subject(
            declaration, declaration.configs[0], problem.dtype, (case,)
        )
    return subjects


def _alone_tells_more(first: Session, subject: Subject) -> bool:
    """Whether every case of an unclean process is run again alone; the only one, if its process
    proved nothing.  After a hang none is: it is known where, and each would take a deadline."""
    outcome = first.judgement.outcome
    if outcome in ("clean", NOT_RUN) or first.hang is not None:
        return False
    return len(subject.cases) > 1 or outcome == "inconclusive"


def _first_unanswered(session: Session, subject: Subject) -> Case:
    """The first case without a good reply, or else the last case."""
    answered = {result.case for result in session.facts.results if result.status == "ok"}
    return next((case for case in subject.cases if case.id not in answered), subject.cases[-1])


def _results(
    futures: dict[Future[R], K], each: Callable[[R], object] = lambda result: None
) -> list[tuple[K, R]]:
    """The futures' results, in no fixed order; `each` gets one as soon as it is there.  If one
    raises, those that have not begun are cancelled."""
    results = []
    try:
        for future in as_completed(futures):
            each(future.result())
            results.append((futures[future], future.result()))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return results
