"""`verify sanitize`: from what was asked to an exit code."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from verify.campaign.run import CampaignRun, open_run
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, say
from verify.campaign.targets import excludes_here
from verify.cell.discovery import environment as environment_here
from verify.cell.process import Environment, InfrastructureError
from verify.evidence import Recorder, load
from verify.evidence.explanation import explain
from verify.machine import device
from verify.problem.case import Case
from verify.sanitizers import report
from verify.sanitizers.facts import WAIVERS, Waiver
from verify.sanitizers.lane import GROUP, Lane, dead, few
from verify.sanitizers.planted import FAULTS, PlantedFault
from verify.sanitizers.report import Account
from verify.sanitizers.selection import select
from verify.sanitizers.session import Booth, Session, Subject
from verify.sanitizers.tool import TOOLS, Sanitizer, find
from verify.variant import Config, Declaration

_LIBRARIES = ("torch",)  # families whose kernels are somebody else's: tried only if they are named
_MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `verify sanitize` was asked.

    environment: where kernels run; None, as a user has it, is this machine's device, which must be
    a CUDA one.  faults and waivers are the suite's own but for its tests.
    """

    kernels: tuple[Path, ...] = ()
    tools: tuple[str, ...] = TOOLS
    variants: tuple[str, ...] = ()
    case: Case | None = None
    quick: bool = False
    workers: str = "auto"
    report_dir: Path | None = None
    environment: Environment | None = None
    faults: tuple[PlantedFault, ...] = FAULTS
    waivers: tuple[Waiver, ...] = WAIVERS

    @property
    def whole(self) -> bool:
        """Whether nothing of the collection is left out."""
        return not (self.kernels or self.variants or self.case or self.quick) and set(
            self.tools
        ) == set(TOOLS)


class _Refused(Exception):  # noqa: N818 - an answer, with its exit code
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def sanitize(request: Request, console: Console) -> int:
    """Try kernels under compute-sanitizer; returns an exit code."""
    try:
        return _sanitize(request, console)
    except _Refused as refused:
        status, text = refused.status, str(refused)
    except InfrastructureError as error:
        status, text = INFRASTRUCTURE, str(error)
    say(console, f"verify: {text}")
    return status


def _sanitize(request: Request, console: Console) -> int:
    begun = time.monotonic()
    sanitizer, environment = _means(request)
    run = open_run(GROUP, _files(request))
    chosen = _chosen(request, run)
    choices = _choices(request, chosen)
    booth = Booth(sanitizer, environment, run.directory / GROUP, request.waivers)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        Recorder(run.directory, GROUP) as recorder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("planted faults", total=len(request.faults) * len(request.tools))

        def done(session: Session) -> None:
            progress.update(task, advance=1)

        lane = Lane(booth, recorder, request.tools, few(request.workers), done)
        account = Account(
            run=run.directory.name,
            device=device.fingerprint(),
            sanitizer=sanitizer.version,
            tools=request.tools,
            whole=request.whole,
            planted=tuple(lane.plant(request.faults)),
            not_run=_not_run(run, chosen),
            waivers=request.waivers,
        )
        if account.alive:  # else nothing that follows would prove anything
            progress.reset(task, total=len(choices) * len(request.tools), description="processes")
            tried = tuple(
                lane.try_all((_subject(request, choice) for choice in choices), environment)
            )
            account = replace(
                account,
                tried=tried,
                dead=tuple(dead(request.waivers, tried)) if request.whole else (),
            )
    return _finish(request, run, replace(account, seconds=time.monotonic() - begun), console)


def _means(request: Request) -> tuple[Sanitizer, Environment]:
    """The tool, and a device for it: without either there is nothing to say."""
    environment = request.environment or environment_here()
    if request.environment is None and environment.device != "cuda":
        raise _Refused(INFRASTRUCTURE, "no CUDA device: nothing was sanitized")
    sanitizer = find()
    if sanitizer is None:
        raise _Refused(
            INFRASTRUCTURE,
            "no compute-sanitizer on PATH, in CUDA_HOME or /usr/local/cuda: nothing was sanitized",
        )
    return sanitizer, environment


def _files(request: Request) -> list[Path]:
    file, at, _ = request.case.variant.rpartition("@") if request.case is not None else ("", "", "")
    return [Path(file)] if at else list(request.kernels)


def _chosen(request: Request, run: CampaignRun) -> list[Declaration]:
    """The variants on trial.  Raises _Refused for an unknown name, for one that cannot run here,
    and where there is none."""
    if run.files and run.roster.unusable:
        raise _Refused(USAGE, run.roster.unusable)
    known = {declaration.ref: declaration for declaration in run.roster.declarations}
    named = (request.case.variant,) if request.case is not None else request.variants
    for name in named:
        if name not in known:
            raise _Refused(USAGE, f"unknown variant {name!r} (known: {', '.join(sorted(known))})")
        reason = excludes_here(known[name])
        if reason is not None:
            raise _Refused(INFRASTRUCTURE, f"{name} cannot run here: {reason}")
    ours = [d for d in run.here if request.kernels or d.family not in _LIBRARIES]
    chosen = [known[name] for name in dict.fromkeys(named)] if named else ours
    if not chosen and not run.roster.failures:
        raise _Refused(INFRASTRUCTURE, "no variant here to sanitize")
    return chosen


def _not_run(run: CampaignRun, chosen: list[Declaration]) -> tuple[tuple[str, str], ...]:
    left = [declaration for declaration in run.roster.declarations if declaration not in chosen]
    return tuple(
        (
            d.ref,
            excludes_here(d)
            or ("a library's kernel" if d.family in _LIBRARIES else "not asked for"),
        )
        for d in left
    )


_Choice = tuple[Declaration, Config, str]


def _choices(request: Request, chosen: list[Declaration]) -> list[_Choice]:
    """Variant, config and dtype of everything that is tried together.  Raises _Refused for a case
    of an unknown config."""
    if request.case is not None:
        case, configs = request.case, {config.name: config for config in chosen[0].configs}
        if case.config not in configs:
            raise _Refused(
                USAGE,
                f"{case.variant} has no config {case.config!r} (configs: {', '.join(configs)})",
            )
        return [(chosen[0], configs[case.config], case.problem.dtype)]
    most = 1 if request.quick else None
    return [
        (d, config, dtype)
        for d in chosen
        for dtype in d.support.dtypes[:most]
        for config in d.configs[:most]
    ]


def _subject(request: Request, choice: _Choice) -> Subject:
    """What one choice is tried on."""
    declaration, config, dtype = choice
    problems = (
        (request.case.problem,)
        if request.case
        else select(declaration, config, dtype, quick=request.quick)
    )
    cases = tuple(Case(declaration.ref, config.name, GROUP, problem) for problem in problems)
    return Subject(declaration, config, dtype, cases)


def _finish(request: Request, run: CampaignRun, account: Account, console: Console) -> int:
    """Print and write what came out; returns the exit code."""
    planted, tried = report.tables(account)
    console.print(planted)
    if account.tried:
        console.print(tried)
    failing = [verdict for verdict in load(run.directory).verdicts if verdict.outcome == "fail"]
    for verdict in failing[:_MOST_SHOWN]:
        say(console, f"\n{explain(verdict)}")
    if len(failing) > _MOST_SHOWN:
        console.print(f"\n... and {len(failing) - _MOST_SHOWN} more failing verdicts", style="red")
    for trialled in account.planted:
        if not trialled.holds:
            said = (
                "; ".join(trialled.session.judgement.reasons) or trialled.session.judgement.outcome
            )
            wanted = trialled.fault.wanted(trialled.session.tool)
            say(
                console,
                f"{trialled.session.tool} on {trialled.fault.variant}: wanted {wanted}, got {said}",
            )
    if not account.alive:
        say(console, "the planted faults were not told from their twins: nothing else was tried")
    for waiver in account.dead:
        say(
            console,
            f"a dead exception: {waiver.tool} {waiver.kind} in {waiver.kernel} ({waiver.reason})"
            " was seen nowhere",
        )
    for folder in filter(None, (run.directory, request.report_dir)):
        paths = report.write(account, folder)
    console.print(
        f"run {account.run}, {account.seconds:.0f} s; report: {paths[-1]}", highlight=False
    )
    return _status(account, loaded=not run.roster.failures)


def _status(account: Account, *, loaded: bool) -> int:
    outcomes = {tried.outcome for tried in account.tried}
    if outcomes & {"faulty", "failed"} or not loaded:
        return FAILED
    return CLEAN if outcomes == {"clean"} and account.alive and not account.dead else INFRASTRUCTURE
