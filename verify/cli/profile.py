"""`verify profile`: runs one config under ncu, and keeps what explains its speed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from references.masks import parse_mask
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, USAGE, say
from verify.campaign.targets import excludes_here
from verify.cell.discovery import environment, roster
from verify.cell.process import Environment, InfrastructureError
from verify.machine import device
from verify.problem import Problem
from verify.profiling.metrics import QUANTITIES, KernelProfile, Quantity
from verify.profiling.session import Launch, profile
from verify.profiling.tool import ProfileError, Profiler, find
from verify.variant import Config, Declaration

_SCHEMA = 1
_MOST_STALLS = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `verify profile`.

    config, dtype: "" is the variant's first one.  shape: batch, heads, seqlen and head dim.
    folder: for the report.
    """

    variant: str
    config: str = ""
    shape: tuple[int, int, int, int]
    dtype: str = ""
    mask: str = "full"
    folder: Path


class _Refused(Exception):  # noqa: N818 - an answer, with its exit code
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def run(request: Request, console: Console) -> int:
    """Profile, print and write the profile; returns an exit code."""
    try:
        profiler, where = _tool()
        declaration = _declaration(request.variant)
        launch = Launch(_config(request, declaration), _problem(request, declaration))
        name = re.sub(r"[^\w.-]+", "-", declaration.ref)
        folder = request.folder / f"profile-{name}"
        kernels = profile(profiler, where, declaration, [launch], folder)
    except _Refused as refused:
        say(console, f"verify: {refused}")
        return refused.status
    except (InfrastructureError, ProfileError) as error:
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    console.print(_table(f"{declaration.ref} {launch.config.name} {launch.problem.name}", kernels))
    path = request.folder / f"profile-{name}.json"
    data = _told(profiler, declaration, launch, kernels)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    console.print(f"written: {path}; for ncu's window: {folder}", highlight=False)
    return CLEAN


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


def _declaration(name: str) -> Declaration:
    file, at, _ = name.rpartition("@")
    listed = roster([Path(file)] if at else None)
    if at and listed.unusable:
        raise _Refused(USAGE, listed.unusable)
    variants = {declaration.ref: declaration for declaration in listed.declarations}
    if name not in variants:
        raise _Refused(USAGE, f"unknown variant {name!r} (known: {', '.join(sorted(variants))})")
    reason = excludes_here(variants[name])
    if reason is not None:
        raise _Refused(INFRASTRUCTURE, f"{name} cannot run here: {reason}")
    return variants[name]


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
    refusal = declaration.support.refusal(problem)
    if refusal is not None:
        raise _Refused(USAGE, f"{declaration.ref} does not support this: {': '.join(refusal)}")
    return problem


def _told(
    profiler: Profiler, declaration: Declaration, launch: Launch, kernels: list[KernelProfile]
) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "variant": declaration.ref,
        "source_hash": declaration.source_hash,
        "config": launch.config.name,
        "problem": launch.problem.name,
        "device": device.fingerprint(),
        "ncu": profiler.version,
        "kernels": [asdict(kernel) for kernel in kernels],
    }


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
