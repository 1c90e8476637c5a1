"""`verify sanitize`: runs kernels under compute-sanitizer and returns an exit code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from verify.campaign.run import CampaignRun, open_run
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, say
from verify.campaign.targets import excludes_here
from verify.cell.discovery import environment as environment_here
from verify.cell.process import Environment, InfrastructureError
from verify.evidence import Recorder, load
from verify.evidence.explanation import explain
from verify.machine import device, settings
from verify.machine.settings import COMPUTE_SANITIZER
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import algebra, counts, report, skew
from verify.sanitizers.course import Course, worker_count
from verify.sanitizers.exceptions import WAIVERS, Waiver
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import GROUP, Lane, excludes
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.report import LaneRun
from verify.sanitizers.results import long_first, not_alive, unused
from verify.sanitizers.selection import covering, select
from verify.sanitizers.session import DEADLINE, NOT_RUN, Booth, Session, Subject
from verify.sanitizers.tool import EVERY, FPSAN, TOOLS, Sanitizer, find
from verify.variant import Config, Declaration

_LIBRARIES = ("torch",)  # families of other projects' kernels: tried only if they are named
_MOST_SHOWN = 8
_Choice = tuple[Declaration, Config, str]
_LONG = 60.0  # seconds of a process that is told at once: where the time of a cut run went


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `verify sanitize`.

    require: whether it is an error that there is no tool or no device.  environment: where kernels
    run; None (the command's value) means this machine's device, which must be a CUDA device.
    planted_only: try no kernel, and of the planted faults not the spare copies.  repeat: how many
    times each planted fault is tried.  earlier: sanitizer.json of runs whose counts are added.
    time: seconds that the run may take; what does not fit is not run.
    faults, waivers: only the suite's tests change them.
    """

    kernels: tuple[Path, ...] = ()
    tools: tuple[str, ...] = EVERY
    variants: tuple[str, ...] = ()
    case: Case | None = None
    quick: bool = False
    planted_only: bool = False
    repeat: int = 1
    earlier: tuple[Path, ...] = ()
    require: bool = False
    workers: str = "auto"
    time: float = math.inf
    report_dir: Path | None = None
    environment: Environment | None = None
    faults: tuple[PlantedFault, ...] = FAULTS
    waivers: tuple[Waiver, ...] = WAIVERS

    @property
    def planted(self) -> tuple[PlantedFault, ...]:
        """The planted faults of this run; spare copies of shipped kernels only with all of them, or
        where planted faults are all that is tried and Triton compiles them, which makes a few."""
        named = self.kernels or self.variants or self.case
        return tuple(
            fault
            for fault in self.faults
            if not fault.spare or not (named or (self.planted_only and not fault.by_triton))
        )

    @property
    def complete(self) -> bool:
        """Whether the complete collection is tried with all tools."""
        part = self.kernels or self.variants or self.case or self.quick or self.planted_only
        return not part and set(self.tools) >= set(EVERY)


class _Refused(Exception):  # noqa: N818 - an answer, with its exit code
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def sanitize(request: Request, console: Console) -> int:
    """Run kernels under compute-sanitizer; returns an exit code."""
    try:
        return _sanitize(request, console)
    except _Refused as refused:
        status, text = refused.status, str(refused)
    except InfrastructureError as error:
        status, text = INFRASTRUCTURE, str(error)
    say(console, f"verify: {text}")
    return status


def _sanitize(request: Request, console: Console) -> int:
    course = Course(request.time)
    try:
        earlier = counts.read(request.earlier)
    except ValueError as error:
        raise _Refused(USAGE, str(error)) from None
    sanitizer, environment = _sanitizer(request)
    run = open_run(GROUP, _files(request))
    declarations = _declarations(request, run)
    choices = _choices(request, declarations)
    booth = Booth(sanitizer, environment, run.directory / GROUP, request.waivers)
    workers = worker_count(request.workers)
    say_plainly(console, _limits(request, workers))
    with Recorder(run.directory, GROUP) as recorder:

        def done(session: Session) -> None:
            if session.seconds > _LONG:
                subject = session.subject.declaration.ref
                say(console, f"{session.tool} on {subject}: {session.seconds:.0f} s")

        lane = Lane(booth, recorder, request.tools, workers, done, course, request.repeat)
        account = LaneRun(
            run=run.directory.name,
            device=device.fingerprint(),
            sanitizer=sanitizer.version,
            tools=request.tools,
            whole=request.complete,
            planted=(),
            not_run=_left_out(run, declarations, request.tools),
            waivers=request.waivers,
            workers=workers,
            earlier=earlier,
        )
        _told(account)

        def so_far(cut: str) -> LaneRun:
            """The account of what has ended."""
            return replace(
                account,
                planted=tuple(lane.planted),
                tried=tuple(lane.tried),
                seconds=time.monotonic() - course.begun,
                stages=dict(course.stages),
                cut=cut,
            )

        def tell(line: str) -> None:
            say_plainly(console, line)
            _write(request, run, so_far("it had not ended when this was written"))

        try:
            with course.watched(tell):
                _try(request, lane, choices, environment, console)
        except InfrastructureError:
            if not course.over():
                raise
        account = so_far(course.over())
        if account.cut and not request.planted_only:
            account = replace(account, not_run=(*account.not_run, *_untried(choices, account)))
        if account.tried and request.complete and account.alive and not account.cut:
            account = replace(account, dead=tuple(unused(request.waivers, account.tried)))
    return _finish(request, run, account, console)


def _told(account: LaneRun) -> None:
    """Raises _Refused if the counts of earlier runs cannot be added to this one."""
    try:
        report.told(account)
    except ValueError as error:
        raise _Refused(USAGE, str(error)) from None


def _untried(choices: list[_Choice], account: LaneRun) -> Iterator[tuple[str, str]]:
    """(variant, reason) of the choices of a run that ended early which no process was begun for."""
    tried = {(t.subject.declaration.ref, t.subject.config, t.subject.dtype) for t in account.tried}
    for declaration, config, dtype in choices:
        if (declaration.ref, config, dtype) not in tried:
            yield declaration.ref, f"not run ({config.name}, {dtype}): {account.cut}"


def _try(
    request: Request,
    lane: Lane,
    choices: list[_Choice],
    environment: Environment,
    console: Console,
) -> None:
    """Run the planted faults and then the kernels, which are built meanwhile."""
    faults = tuple(fault.under(lane.booth.sanitizer) for fault in request.planted)
    longest = sorted(enumerate(choices), key=lambda each: long_first(each[1][0]))
    subjects = (
        (number, _subject(request, choice))
        for number, choice in longest
        if not lane.course.over()  # to select problems takes a second
    )
    with ThreadPoolExecutor(2) as beside:
        rehearsed = (
            None if request.planted_only else beside.submit(lane.rehearse, subjects, environment)
        )
        try:
            planted = lane.plant(faults)
        except BaseException:
            lane.course.stop("a planted fault cannot be tried")
            raise
        dead = not_alive(lane.tools, planted)
        say_plainly(console, f"planted faults: {len(planted)} processes, {len(dead)} tools failed")
        delayed = beside.submit(lane.delay)  # copies that no tool has caught prove nothing of tools
        if not lane.course.over():
            lane.tools = tuple(tool for tool in lane.tools if tool not in dead)
        if rehearsed is not None and planted and lane.tools:
            lane.try_all(rehearsed.result())
        delayed.result()


def say_plainly(console: Console, line: str) -> None:
    """Print a line of progress, unwrapped."""
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _limits(request: Request, workers: int) -> str:
    most = "" if request.time == math.inf else f", {request.time:g} s in all"
    under_tool, delayed = (
        settings.seconds("VERIFY_DEADLINE", own) for own in (DEADLINE, skew.DEADLINE)
    )
    return (
        f"{workers} processes at the same time; deadline of a run {under_tool:g} s under a tool,"
        f" {delayed:g} s with delays, builds not counted{most}"
    )


def _sanitizer(request: Request) -> tuple[Sanitizer, Environment]:
    """The tool and its environment.  Raises _Refused without a CUDA device or without the tool."""
    environment = request.environment or environment_here()
    if request.environment is None and environment.device != "cuda":
        raise _not_run(request, "no CUDA device")
    if not set(request.tools) & set(TOOLS):
        return Sanitizer("", "not used"), environment
    sanitizer = find()
    if sanitizer is None:
        place = "no compute-sanitizer on PATH, in CUDA_HOME or /usr/local/cuda"
        if named := os.environ.get(COMPUTE_SANITIZER):
            place = f"{COMPUTE_SANITIZER}: {named} tells no version"
        raise _not_run(request, place)
    return sanitizer, environment


def _not_run(request: Request, reason: str) -> _Refused:
    if request.require:
        return _Refused(INFRASTRUCTURE, f"{reason}: nothing was sanitized")
    return _Refused(CLEAN, f"{reason}: not run (with --require this is an error)")


def _files(request: Request) -> list[Path]:
    file, at, _ = request.case.variant.rpartition("@") if request.case is not None else ("", "", "")
    return [Path(file)] if at else list(request.kernels)


def _declarations(request: Request, run: CampaignRun) -> list[Declaration]:
    """The variants to try.

    Raises _Refused for an unknown name, for a variant that cannot run here, and if there is none.
    """
    if run.files and run.roster.unusable:
        raise _Refused(USAGE, run.roster.unusable)
    if run.roster.lacking:
        raise _Refused(INFRASTRUCTURE, run.roster.lacking)
    variants = {declaration.ref: declaration for declaration in run.roster.declarations}
    named = (request.case.variant,) if request.case is not None else request.variants
    for name in named:
        if name not in variants:
            raise _Refused(
                USAGE, f"unknown variant {name!r} (known: {', '.join(sorted(variants))})"
            )
        reason = excludes_here(variants[name])
        if reason is not None:
            raise _Refused(INFRASTRUCTURE, f"{name} cannot run here: {reason}")
    ours = [d for d in run.here if request.kernels or d.family not in _LIBRARIES]
    selected = [variants[name] for name in dict.fromkeys(named)] if named else ours
    if not selected and not run.roster.failures:
        raise _Refused(INFRASTRUCTURE, "no variant here to sanitize")
    return selected


def _left_out(
    run: CampaignRun, selected: list[Declaration], tools: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """(variant, reason) of those that are not tried, or not under one of the tools."""
    others = [declaration for declaration in run.roster.declarations if declaration not in selected]
    left = [
        (
            d.ref,
            excludes_here(d)
            or ("a library's kernel" if d.family in _LIBRARIES else "not asked for"),
        )
        for d in others
    ]
    reasons = ((d.ref, excludes(tool, d)) for d in selected for tool in tools)
    return (*left, *((ref, reason) for ref, reason in reasons if reason is not None))


def _choices(request: Request, selected: list[Declaration]) -> list[_Choice]:
    """The (variant, config, dtype) of each subject.  Raises _Refused for a case of an unknown
    config."""
    if request.case is not None:
        case = request.case
        try:
            return [(selected[0], selected[0].config(case.config), case.problem.dtype)]
        except KeyError as error:
            raise _Refused(USAGE, str(error.args[0])) from None
    most = 1 if request.quick else None
    return [
        (d, config, dtype)
        for d in selected
        if any(excludes(tool, d) is None for tool in request.tools)
        for dtype in d.support.dtypes[:most]
        for config in (covering(d.configs) if request.quick else d.configs)
    ]


def _subject(request: Request, choice: _Choice) -> Subject:
    """The subject of one choice: its cases."""
    declaration, config, dtype = choice
    problems = (
        (request.case.problem,) if request.case else _problems(request, declaration, config, dtype)
    )
    cases = tuple(Case(declaration.ref, config.name, GROUP, problem) for problem in problems)
    return Subject(declaration, config, dtype, cases)


def _problems(
    request: Request, declaration: Declaration, config: Config, dtype: str
) -> tuple[Problem, ...]:
    """The problems of a choice; for FPSan, those with which it can compare."""
    own = algebra.problems(declaration, dtype) if FPSAN in request.tools else ()
    if set(request.tools) == {FPSAN}:
        return own
    return (*select(declaration, config, dtype, quick=request.quick), *own)


def _finish(request: Request, run: CampaignRun, account: LaneRun, console: Console) -> int:
    """Print and write the results; returns the exit code."""
    planted_table, table = report.tables(account)
    console.print(planted_table)
    if account.tried:
        console.print(table)
    failing = [verdict for verdict in load(run.directory).verdicts if verdict.outcome == "fail"]
    for verdict in failing[:_MOST_SHOWN]:
        say(console, f"\n{explain(verdict)}")
    if len(failing) > _MOST_SHOWN:
        console.print(f"\n... and {len(failing) - _MOST_SHOWN} more failing verdicts", style="red")
    for planted in account.planted:
        if not planted.holds and planted.session.judgement.outcome != NOT_RUN:
            got = "; ".join(planted.session.judgement.reasons) or planted.session.judgement.outcome
            wanted = planted.fault.wanted(planted.session.tool)
            say(
                console,
                f"{planted.session.tool} on {planted.fault.variant}: wanted {wanted}, got {got}",
            )
    for tool in () if account.cut else request.tools:
        if tool not in account.alive_tools:
            said = (
                f"{tool} missed a planted fault or convicted a twin: no kernel was tried under it"
            )
            say(console, said)
    for copy in () if account.cut else account.uncaught:
        say(console, f"{copy}: nothing caught this known-bad copy of a shipped kernel")
    for waiver in account.dead:
        say(
            console,
            f"a dead exception: {waiver.tool} {waiver.kind} in {waiver.kernel} ({waiver.reason})"
            " matched no record",
        )
    if account.cut:
        say(console, f"{account.cut}: what was not tried is listed as not run; nothing is proved")
    paths = _write(request, run, account)
    console.print(
        f"run {account.run}, {account.seconds:.0f} s; report: {paths[-1]}", highlight=False
    )
    if request.planted_only:
        return CLEAN if account.alive and not account.cut else INFRASTRUCTURE
    return _status(account, loaded=not run.roster.failures)


def _write(request: Request, run: CampaignRun, account: LaneRun) -> list[Path]:
    """Write the reports; returns the paths of those in the last folder."""
    paths = []
    for folder in filter(None, (run.directory, request.report_dir)):
        paths = report.write(account, folder)
    return paths


def _status(account: LaneRun, *, loaded: bool) -> int:
    outcomes = {tried.outcome for tried in account.tried}
    if outcomes & {"faulty", "failed"} or not loaded:
        return FAILED
    proved = account.alive and not account.dead and not account.cut
    # Without an early end, only a declared limit of a tool leaves a kernel out.
    whole = "clean" in outcomes and outcomes <= {"clean", NOT_RUN}
    return CLEAN if whole and proved else INFRASTRUCTURE
