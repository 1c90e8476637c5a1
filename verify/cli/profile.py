"""`verify profile`: runs a config of each variant under ncu, and keeps what explains its speed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from references.masks import parse_mask
from verify import report as accuracy
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, USAGE, say
from verify.campaign.targets import excludes_here
from verify.cell.discovery import environment, roster
from verify.cell.process import Environment, InfrastructureError
from verify.machine import device
from verify.problem import Problem
from verify.profiling.metrics import QUANTITIES, KernelProfile, Quantity
from verify.profiling.record import SCHEMA_VERSION, Profile, Profiles, keep, kernels_of
from verify.profiling.session import Launch, profile
from verify.profiling.tool import ProfileError, Profiler, find
from verify.timing.workloads import as_stored
from verify.variant import Config, Declaration

_MOST_STALLS = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `verify profile`.

    variants: names, or FILE@NAME.  config, dtype: "" is a variant's first one.  shape: batch,
    heads, seqlen and head dim.  folder, published: for the report.
    """

    variants: tuple[str, ...]
    config: str = ""
    shape: tuple[int, int, int, int]
    dtype: str = ""
    mask: str = "full"
    folder: Path
    published: Path | None = None


class _Refused(Exception):  # noqa: N818 - an answer, with its exit code
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def run(request: Request, console: Console) -> int:
    """Profile, print and write the profiles; returns an exit code.

    A variant that cannot be profiled is said, and the others go on; the first reason gives the
    code.
    """
    try:
        profiler, where = _tool()
        declarations = _declarations(request.variants)
    except _Refused as refused:
        say(console, f"verify: {refused}")
        return refused.status
    codes = []
    try:
        for declaration in declarations:
            codes.append(_attempt(request, profiler, where, declaration, console))
    finally:  # what was measured before an interruption is shown too
        if CLEAN in codes:
            for folder in filter(None, (request.folder, request.published)):
                accuracy.render_again(folder)
    return next((code for code in codes if code != CLEAN), CLEAN)


def _attempt(
    request: Request,
    profiler: Profiler,
    where: Environment,
    declaration: Declaration,
    console: Console,
) -> int:
    """Profile a variant, or say why not; returns an exit code."""
    try:
        _measure(request, profiler, where, declaration, console)
    except _Refused as refused:
        say(console, f"verify: {refused}")
        return refused.status
    except (InfrastructureError, ProfileError) as error:
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    return CLEAN


def _measure(
    request: Request,
    profiler: Profiler,
    where: Environment,
    declaration: Declaration,
    console: Console,
) -> None:
    reason = excludes_here(declaration)
    if reason is not None:
        raise _Refused(INFRASTRUCTURE, f"{declaration.ref} cannot run here: {reason}")
    launch = Launch(_config(request, declaration), _problem(request, declaration))
    name = re.sub(r"[^\w.-]+", "-", declaration.ref)
    window = request.folder / f"profile-{name}"
    kernels = profile(profiler, where, declaration, [launch], window)
    console.print(_table(f"{declaration.ref} {launch.config.name} {launch.problem.name}", kernels))
    told: Profile = {
        "variant": declaration.ref,
        "source_hash": declaration.source_hash,
        "config": launch.config.name,
        "problem": launch.problem.name,
        "ncu": profiler.version,
        "kernels": kernels_of(kernels),
    }
    record: Profiles = {
        "schema": SCHEMA_VERSION,
        "device": device.fingerprint(),
        "profiles": [told],
    }
    for folder in filter(None, (request.folder, request.published)):
        path = keep(folder, record)
        console.print(f"written: {path}", highlight=False)
    console.print(f"for ncu's window: {window}", highlight=False)


def _tool() -> tuple[Profiler, Environment]:
    where = environment()
    if where.device != "cuda":
        raise _Refused(INFRASTRUCTURE, "no CUDA device: nothing was profiled")
    profiler = find()
    if profiler is None:
        raise _Refused(
            INFRASTRUCTURE,
            "no ncu on PATH, in CUDA_HOME or /usr/local/cuda: nothing was profiled",
        )
    return profiler, where


def _declarations(names: Sequence[str]) -> list[Declaration]:
    files = [Path(name.rpartition("@")[0]) for name in names if "@" in name]
    listed = roster(files or None)
    if files and listed.unusable:
        raise _Refused(USAGE, listed.unusable)
    if listed.lacking:
        raise _Refused(INFRASTRUCTURE, listed.lacking)
    variants = {declaration.ref: declaration for declaration in listed.declarations}
    for name in names:
        if name not in variants:
            known = ", ".join(sorted(variants))
            raise _Refused(USAGE, f"unknown variant {name!r} (known: {known})")
    return [variants[name] for name in names]


def _config(request: Request, declaration: Declaration) -> Config:
    try:
        return declaration.config(request.config or declaration.configs[0].name)
    except KeyError as error:
        raise _Refused(USAGE, f"--config: {error.args[0]}") from None


def _problem(request: Request, declaration: Declaration) -> Problem:
    batch, heads, seqlen, head_dim = request.shape
    try:
        problem = Problem(
            batch=batch,
            heads_q=heads,
            heads_kv=heads,
            seqlen_q=seqlen,
            seqlen_kv=seqlen,
            head_dim=head_dim,
            dtype=request.dtype or declaration.support.dtypes[0],
            mask=parse_mask(request.mask),
        )
    except ValueError as error:
        raise _Refused(USAGE, f"--shape, --dtype or --mask: {error}") from None
    problem = as_stored(problem, declaration.support)
    refusal = declaration.support.refusal(problem)
    if refusal is not None:
        raise _Refused(USAGE, f"{declaration.ref} does not support this: {': '.join(refusal)}")
    return problem


def _table(title: str, kernels: list[KernelProfile]) -> Table:
    """One column for each kernel that the launch started, the slowest first."""
    ordered = sorted(kernels, key=lambda kernel: -(kernel.values["duration"] or 0.0))
    table = Table("", *(kernel.name for kernel in ordered), title=title)
    table.add_row("grid x block", *(f"{kernel.grid} x {kernel.block}" for kernel in ordered))
    for quantity in QUANTITIES:
        table.add_row(quantity.label, *(_shown(quantity, k.values[quantity.key]) for k in ordered))
    table.add_row("occupancy limited by", *map(_limiter, ordered))
    table.add_row("cycles between issues spent on", *map(_stalls, ordered))
    return table


def _shown(quantity: Quantity, value: float | None) -> str:
    if value is None:
        return "not measured"
    if quantity.unit == "s":
        return f"{1e6 * value:,.1f} us"
    if quantity.unit == "%":
        return f"{value:.1f} %"
    number = f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
    return f"{number} {quantity.unit}".rstrip()


def _limiter(kernel: KernelProfile) -> str:
    """The resources that allow the fewest blocks, and how many."""
    if not kernel.limits:
        return "not measured"
    fewest = min(kernel.limits.values())
    names = [name for name, blocks in kernel.limits.items() if blocks == fewest]
    return f"{', '.join(names)}: {fewest:.0f} blocks per SM"


def _stalls(kernel: KernelProfile) -> str:
    longest = list(kernel.stalls.items())[:_MOST_STALLS]
    return "\n".join(f"{why} {cycles:.2f}" for why, cycles in longest) or "not measured"
