"""What `verify sanitize` is asked, and what it tries therefore: tools, variants, cases."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from verify.campaign.run import CampaignRun
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, USAGE
from verify.campaign.targets import excludes_here
from verify.cell.discovery import environment as environment_here
from verify.cell.process import Environment
from verify.machine.settings import COMPUTE_SANITIZER
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import algebra
from verify.sanitizers.exceptions import WAIVERS, Waiver
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import GROUP, excludes
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.selection import covering, select
from verify.sanitizers.session import Subject
from verify.sanitizers.tool import EVERY, FPSAN, TOOLS, Sanitizer, find
from verify.variant import Config, Declaration

_LIBRARIES = ("torch",)  # families of other projects' kernels: tried only if they are named
Choice = tuple[Declaration, Config, str]


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


class Refused(Exception):  # noqa: N818 - an answer, with its exit code
    """Nothing is tried: why, and the exit code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def sanitizer(request: Request) -> tuple[Sanitizer, Environment]:
    """The tool and its environment.  Raises Refused without a CUDA device or without the tool."""
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


def _not_run(request: Request, reason: str) -> Refused:
    if request.require:
        return Refused(INFRASTRUCTURE, f"{reason}: nothing was sanitized")
    return Refused(CLEAN, f"{reason}: not run (with --require this is an error)")


def files(request: Request) -> list[Path]:
    """The kernel files that are named, by a case or alone."""
    file, at, _ = request.case.variant.rpartition("@") if request.case is not None else ("", "", "")
    return [Path(file)] if at else list(request.kernels)


def declarations(request: Request, run: CampaignRun) -> list[Declaration]:
    """The variants to try.

    Raises Refused for an unknown name, for a variant that cannot run here, and if there is none.
    """
    if run.files and run.roster.unusable:
        raise Refused(USAGE, run.roster.unusable)
    if run.roster.lacking:
        raise Refused(INFRASTRUCTURE, run.roster.lacking)
    variants = {declaration.ref: declaration for declaration in run.roster.declarations}
    named = (request.case.variant,) if request.case is not None else request.variants
    for name in named:
        if name not in variants:
            raise Refused(USAGE, f"unknown variant {name!r} (known: {', '.join(sorted(variants))})")
        reason = excludes_here(variants[name])
        if reason is not None:
            raise Refused(INFRASTRUCTURE, f"{name} cannot run here: {reason}")
    ours = [d for d in run.here if request.kernels or d.family not in _LIBRARIES]
    selected = [variants[name] for name in dict.fromkeys(named)] if named else ours
    if not selected and not run.roster.failures:
        raise Refused(INFRASTRUCTURE, "no variant here to sanitize")
    return selected


def left_out(
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


def choices(request: Request, selected: list[Declaration]) -> list[Choice]:
    """The (variant, config, dtype) of each subject.  Raises Refused for a case of an unknown
    config."""
    if request.case is not None:
        case = request.case
        try:
            return [(selected[0], selected[0].config(case.config), case.problem.dtype)]
        except KeyError as error:
            raise Refused(USAGE, str(error.args[0])) from None
    most = 1 if request.quick else None
    return [
        (d, config, dtype)
        for d in selected
        if any(excludes(tool, d) is None for tool in request.tools)
        for dtype in d.support.dtypes[:most]
        for config in (covering(d.configs) if request.quick else d.configs)
    ]


def subject(request: Request, choice: Choice) -> Subject:
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
