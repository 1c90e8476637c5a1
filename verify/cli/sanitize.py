"""`verify sanitize`: runs kernels under compute-sanitizer and returns an exit code."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from verify.campaign.run import CampaignRun, open_run
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, say
from verify.cell.process import Environment, InfrastructureError
from verify.cli import sanitize_choice as choice
from verify.cli.sanitize_choice import Choice, Refused, Request
from verify.evidence import Recorder, load
from verify.evidence.explanation import explain
from verify.machine import device, settings
from verify.sanitizers import counts, report, skew
from verify.sanitizers.course import Course, worker_count
from verify.sanitizers.lane import GROUP, Lane
from verify.sanitizers.report import LaneRun
from verify.sanitizers.results import long_first, not_alive, unused
from verify.sanitizers.session import DEADLINE, NOT_RUN, Booth, Session

_MOST_SHOWN = 8
_LONG = 60.0  # seconds of a process that is told at once: where the time of a cut run went


def sanitize(request: Request, console: Console) -> int:
    """Run kernels under compute-sanitizer; returns an exit code."""
    try:
        return _sanitize(request, console)
    except Refused as refused:
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
        raise Refused(USAGE, str(error)) from None
    sanitizer, environment = choice.sanitizer(request)
    run = open_run(GROUP, choice.files(request))
    declarations = choice.declarations(request, run)
    choices = choice.choices(request, declarations)
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
            not_run=choice.left_out(run, declarations, request.tools),
            waivers=tuple(
                waiver
                for waiver in request.waivers
                if waiver.version == sanitizer.version and waiver.tool in request.tools
            ),
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
            dead = unused(account.waivers, account.planted, account.tried)
            account = replace(account, dead=tuple(dead))
    return _finish(request, run, account, console)


def _told(account: LaneRun) -> None:
    """Raises Refused if the counts of earlier runs cannot be added to this one."""
    try:
        report.told(account)
    except ValueError as error:
        raise Refused(USAGE, str(error)) from None


def _untried(choices: list[Choice], account: LaneRun) -> Iterator[tuple[str, str]]:
    """(variant, reason) of the choices of a run that ended early which no process was begun for."""
    tried = {(t.subject.declaration.ref, t.subject.config, t.subject.dtype) for t in account.tried}
    for declaration, config, dtype in choices:
        if (declaration.ref, config, dtype) not in tried:
            yield declaration.ref, f"not run ({config.name}, {dtype}): {account.cut}"


def _try(
    request: Request,
    lane: Lane,
    choices: list[Choice],
    environment: Environment,
    console: Console,
) -> None:
    """Run the planted faults and then the kernels, which are built meanwhile."""
    faults = tuple(fault.under(lane.booth.sanitizer) for fault in request.planted)
    longest = sorted(enumerate(choices), key=lambda each: long_first(each[1][0]))
    subjects = (
        (number, choice.subject(request, each))
        for number, each in longest
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


def _finish(request: Request, run: CampaignRun, account: LaneRun, console: Console) -> int:
    """Print and write the results; returns the exit code."""
    planted_table, table = report.tables(account)
    console.print(planted_table)
    if account.tried:
        console.print(table)
    failing = load(run.directory).verdicts.failing
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
