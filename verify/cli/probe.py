"""`verify probe`: measures the device at hand and compares it with the tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import click
import torch
from rich.console import Console

from verify import report as accuracy
from verify.arithmetic.archs import arch_named
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, say
from verify.campaign.targets import excludes_here
from verify.cell.arena import Arena
from verify.cell.discovery import environment, roster
from verify.cell.process import Cell, ForkServer, InfrastructureError
from verify.evidence.strict_json import dumps
from verify.machine import device
from verify.machine.cores import cores
from verify.probes import functions, matrix, order, rendering, toolchain
from verify.probes.functions import FUNCTIONS, FunctionProbe, Surveyor
from verify.probes.instructions import INSTRUCTIONS, Bench
from verify.probes.matrix import MatrixProbe
from verify.probes.order import OrderProbe
from verify.probes.report import PAGE, ProbeNotRun, ProbeReport, as_data, write
from verify.probes.worker import Job, do_all

T = TypeVar("T", MatrixProbe, FunctionProbe)
_PATIENCE = 240.0  # seconds for one probe
_CORES_EACH = 4  # of a process, whose model is computed on the CPU


@dataclass(frozen=True)
class Request:
    """What `verify probe` was asked: kernel files (none: the collection), the folder of the
    device's report, which gets probes.{json,md}, and another that gets them if no probe failed."""

    kernels: tuple[Path, ...]
    folder: Path
    published: Path | None = None


def probe(request: Request, as_json: bool) -> int:
    """Measure the device, write what was found and show it; returns an exit code.

    It is 1 if anything disagrees with the tables that bounds rely on.
    """
    # a log file needs no narrow table
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    report = measure(request, console)
    _accompany(request.folder)
    if as_json:
        click.echo(dumps(as_data(report), indent=1))
    else:
        _show(report, console)
    console.print(f"report: {request.folder / PAGE}", highlight=False)
    if request.published is not None and report.failed:
        say(console, f"not published, since probes failed: {', '.join(report.failed)}")
    elif request.published is not None:
        write(report, request.published, rendering.markdown(report))
        _accompany(request.published)
        console.print(f"published: {request.published / PAGE}", highlight=False)
    if not report.agrees:
        return FAILED
    return INFRASTRUCTURE if report.failed else CLEAN


def _accompany(folder: Path) -> None:
    """Write the accuracy report of a folder again, if there is one, with the probes beside it."""
    if (folder / "report.json").is_file():
        accuracy.write(accuracy.read(folder), folder)


def measure(request: Request, console: Console) -> ProbeReport:
    """Run every probe; the report is written after each stage, so that what was measured outlives
    what follows."""
    begun = time.monotonic()
    report = ProbeReport(device.fingerprint())

    def so_far(report: ProbeReport) -> ProbeReport:
        report = replace(report, seconds=round(time.monotonic() - begun, 1))
        write(report, request.folder, rendering.markdown(report))
        return report

    for stage in (_matrix, _functions, _orders):
        report = so_far(stage(report, request, console))
    return report


def _matrix(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    arch, absent = _arch()
    chosen, left = _choose([(one.name, one.not_on) for one in INSTRUCTIONS], arch, absent)
    jobs = [Job(probe_instruction, (name, arch, _CORES_EACH)) for name in chosen]
    found = _done(jobs, chosen, MatrixProbe, console)
    return replace(report, arch=arch, matrix=tuple(found), not_run=(*report.not_run, *left))


def _functions(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    arch, absent = _arch()
    chosen, left = _choose([(one.name, one.not_on) for one in FUNCTIONS], arch, absent)
    found = _done(
        [Job(probe_function, (name, arch)) for name in chosen], chosen, FunctionProbe, console
    )
    return replace(report, functions=tuple(found), not_run=(*report.not_run, *left))


def probe_instruction(name: str, arch: str, threads: int) -> MatrixProbe:
    """Try one of INSTRUCTIONS on the current device, of that arch ("sm_90a"); threads: of the CPU,
    for the model."""
    torch.set_num_threads(threads)
    instruction = {one.name: one for one in INSTRUCTIONS}[name]
    return matrix.probe(Bench(instruction), arch_named(arch).name)


def probe_function(name: str, arch: str) -> FunctionProbe:
    """Try one of FUNCTIONS on the current device, of that arch."""
    return functions.probe(
        Surveyor({one.name: one for one in FUNCTIONS}[name]), arch=arch_named(arch).name
    )


def _arch() -> tuple[str, str | None]:
    """What to compile for, asked in a process of its own; or why nothing can run."""
    absent = "no GPU" if environment().device != "cuda" else None
    if absent is None:
        (answer,) = do_all([Job(here)], 1, _PATIENCE)
        return answer.result or ("", answer.failure)
    return "", absent


def here() -> tuple[str, str | None]:
    """The current device's arch, or why nothing can run on it."""
    absent = toolchain.not_here()
    return ("", absent) if absent else (toolchain.device_arch(), None)


def _choose(
    offered: Sequence[tuple[str, Callable[[str], str | None]]], arch: str, absent: str | None
) -> tuple[list[str], list[ProbeNotRun]]:
    """Names that can run, and the others with their reasons."""
    chosen, left = [], []
    for name, not_on in offered:
        reason = absent or not_on(arch)
        if reason is None:
            chosen.append(name)
        else:
            left.append(ProbeNotRun(name, reason))
    return chosen, left


def _done(
    jobs: Sequence[Job[T]], names: Sequence[str], kind: Callable[..., T], console: Console
) -> list[T]:
    """Every job's result, one line each; what gave none gets a result that says so."""
    processes = max(1, min(4, cores() // _CORES_EACH))
    found: list[T] = []
    for name, answer in zip(names, do_all(jobs, processes, _PATIENCE), strict=True):
        one: T = answer.result or kind(name, error=answer.failure)
        found.append(one)
        word = "FAILED" if one.error else "agrees" if one.agrees else "DISAGREES"
        console.print(
            f"{word:10} {name} ({one.seconds:.1f} s)",
            style=None if word == "agrees" else "red",
            highlight=False,
        )
    return found


def _orders(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    found, left = [], []
    listed = roster(list(request.kernels) or None)
    left += [
        ProbeNotRun(f"summation order of {failure.ref}", "does not load")
        for failure in listed.failures
    ]
    reasons = [(declaration, excludes_here(declaration)) for declaration in listed.declarations]
    left += [
        ProbeNotRun(f"summation order of {declaration.ref}", reason)
        for declaration, reason in reasons
        if reason
    ]
    able = [declaration for declaration, reason in reasons if reason is None]
    if not able:
        return replace(report, not_run=(*report.not_run, *left))
    fork_server, arena = ForkServer(environment()), Arena()
    try:
        for declaration in able:
            cell = Cell(fork_server)
            try:
                one = order.probe(declaration, declaration.configs[0], cell, arena, cell.arch())
            except InfrastructureError as error:
                one = OrderProbe(declaration.ref, declaration.configs[0].name, reason=str(error))
            finally:
                cell.close()
            found.append(one)
            console.print(
                f"{'order':10} {one.variant}: {one.reason or one.order} ({one.seconds:.1f} s)",
                highlight=False,
            )
    finally:
        fork_server.close()
        arena.close()
    return replace(report, orders=tuple(found), not_run=(*report.not_run, *left))


def _show(report: ProbeReport, console: Console) -> None:
    for table in rendering.tables(report):
        console.print(table)
    for line in rendering.details(report):
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    for entry in report.not_run:
        console.print(
            f"{entry.name}: not run: {entry.reason}", style="dim", markup=False, highlight=False
        )
