"""`verify probe`: measures this machine's device and compares it with the tables."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from verify.document import terminal
from verify.evidence.strict_json import dumps
from verify.machine import device
from verify.machine.cores import cores
from verify.probes import conformance, functions, gradient_order, matrix, order, page, toolchain
from verify.probes.conformance import CONFORMING, Warp
from verify.probes.functions import FUNCTIONS, Surveyor
from verify.probes.instructions import INSTRUCTIONS, Bench
from verify.probes.report import (
    PAGE,
    Compared,
    ConformanceProbe,
    FunctionProbe,
    GradientOrderProbe,
    MatrixProbe,
    OrderProbe,
    ProbeNotRun,
    ProbeReport,
    as_data,
    write,
)
from verify.probes.worker import Job, do_all
from verify.variant import Declaration, GradientOrder

T = TypeVar("T", MatrixProbe, FunctionProbe, ConformanceProbe)
P = TypeVar("P", OrderProbe, GradientOrderProbe)
STAGES = ("conformance", "matrix", "functions", "orders", "gradients")
_PATIENCE = 240.0  # seconds for one probe
_CORES_EACH = 4  # per process, which computes a model on the CPU
_CELLS = 8  # backwards at the same time: their builds take longer than they run


@dataclass(frozen=True)
class Request:
    """A call of `verify probe`.

    kernels: kernel files (none: the collection).  folder: the folder of the device's report, which
    gets probes.{json,md}.  published: a second folder, which gets them if no probe failed.  only:
    the stages that run (none: all of `STAGES`).
    """

    kernels: tuple[Path, ...]
    folder: Path
    published: Path | None = None
    only: tuple[str, ...] = ()


def probe(request: Request, as_json: bool) -> int:
    """Measure the device, write the results and show them; returns an exit code.

    It is 1 if a result disagrees with the tables that the bounds use, the PTX manual, or a declared
    order.
    """
    # a log file needs no narrow table
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    report = measure(request, console)
    accuracy.render_again(request.folder)
    if as_json:
        click.echo(dumps(as_data(report), depth=4))
    else:
        _show(report, console)
    console.print(f"report: {request.folder / PAGE}", highlight=False)
    if request.published is not None and report.failed:
        say(console, f"not published, since probes failed: {', '.join(report.failed)}")
    elif request.published is not None:
        write(report, request.published, page.markdown(report))
        accuracy.render_again(request.published)
        console.print(f"published: {request.published / PAGE}", highlight=False)
    if not report.agrees:
        return FAILED
    return INFRASTRUCTURE if report.failed else CLEAN


def measure(request: Request, console: Console) -> ProbeReport:
    """Run every probe.  The report is written after each stage, so that a failure in a later stage
    loses nothing."""
    begun = time.monotonic()
    report = ProbeReport(device.fingerprint())

    def written(report: ProbeReport) -> ProbeReport:
        report = replace(report, seconds=round(time.monotonic() - begun, 1))
        write(report, request.folder, page.markdown(report))
        return report

    stages = dict(
        zip(STAGES, (_conformance, _matrix, _functions, _orders, _gradients), strict=True)
    )
    for name in request.only or STAGES:
        report = written(stages[name](report, request, console))
    return report


def _matrix(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    arch, absent = _arch()
    names, not_run = _choose([(one.name, one.unsupported_on) for one in INSTRUCTIONS], arch, absent)
    jobs = [Job(probe_instruction, (name, arch, _CORES_EACH)) for name in names]
    probes = _run_jobs(jobs, names, MatrixProbe, console)
    return replace(report, arch=arch, matrix=tuple(probes), not_run=(*report.not_run, *not_run))


def _functions(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    arch, absent = _arch()
    names, not_run = _choose([(one.name, one.unsupported_on) for one in FUNCTIONS], arch, absent)
    probes = _run_jobs(
        [Job(probe_function, (name, arch)) for name in names], names, FunctionProbe, console
    )
    return replace(report, functions=tuple(probes), not_run=(*report.not_run, *not_run))


def _conformance(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    arch, absent = _arch()
    names, not_run = _choose([(one.name, one.unsupported_on) for one in CONFORMING], arch, absent)
    jobs = [Job(probe_conformance, (name,)) for name in names]
    probes = _run_jobs(jobs, names, ConformanceProbe, console)
    found = tuple(probes)
    return replace(report, arch=arch, conformance=found, not_run=(*report.not_run, *not_run))


def probe_instruction(name: str, arch: str, threads: int) -> MatrixProbe:
    """Probe one of INSTRUCTIONS on the current device.

    arch: the device's architecture, such as "sm_90a".  threads: CPU threads for the model.
    """
    torch.set_num_threads(threads)
    instruction = {one.name: one for one in INSTRUCTIONS}[name]
    return matrix.probe(Bench(instruction), arch_named(arch).name)


def probe_function(name: str, arch: str) -> FunctionProbe:
    """Probe one of FUNCTIONS on the current device, whose architecture is `arch`."""
    return functions.probe(
        Surveyor({one.name: one for one in FUNCTIONS}[name]), arch=arch_named(arch).name
    )


def probe_conformance(name: str) -> ConformanceProbe:
    """Compare one of CONFORMING with the manual, on the current device."""
    return conformance.probe(Warp(), {one.name: one for one in CONFORMING}[name])


def _arch() -> tuple[str, str | None]:
    """(architecture to compile for, None), asked in a separate process; or ("", why nothing can
    run)."""
    absent = "no GPU" if environment().device != "cuda" else None
    if absent is None:
        (answer,) = do_all([Job(arch_here)], 1, _PATIENCE)
        return answer.result or ("", answer.failure)
    return "", absent


def arch_here() -> tuple[str, str | None]:
    """(the current device's architecture, None), or ("", why nothing can run on it)."""
    absent = toolchain.not_here()
    return ("", absent) if absent else (toolchain.device_arch(), None)


def _choose(
    offered: Sequence[tuple[str, Callable[[str], str | None]]], arch: str, absent: str | None
) -> tuple[list[str], list[ProbeNotRun]]:
    """The names that can run, and the others with their reasons."""
    names, not_run = [], []
    for name, unsupported_on in offered:
        reason = absent or unsupported_on(arch)
        if reason is None:
            names.append(name)
        else:
            not_run.append(ProbeNotRun(name, reason))
    return names, not_run


def _run_jobs(
    jobs: Sequence[Job[T]], names: Sequence[str], kind: Callable[..., T], console: Console
) -> list[T]:
    """Run the jobs, print one line for each, and return their results.  A job without a result gets
    one that holds the error."""
    processes = max(1, min(4, cores() // _CORES_EACH))
    probes: list[T] = []
    for name, answer in zip(names, do_all(jobs, processes, _PATIENCE), strict=True):
        result: T = answer.result or kind(name, error=answer.failure)
        probes.append(result)
        _say(result, console)
    return probes


def _say(result: Compared, console: Console) -> None:
    word = "FAILED" if result.error else "agrees" if result.agrees else "DISAGREES"
    console.print(
        f"{word:10} {result.name} ({result.seconds:.1f} s)",
        style=None if word == "agrees" else "red",
        highlight=False,
    )


def _orders(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    listed = roster(list(request.kernels) or None)
    left = [(failure.ref, "does not load") for failure in listed.failures]
    left += [(file.ref, file.message) for file in listed.unmet]
    able, excluded = _able(listed.declarations)
    not_run = [ProbeNotRun(f"summation order of {ref}", why) for ref, why in (*left, *excluded)]

    def ask(declaration: Declaration, cell: Cell, arena: Arena) -> list[OrderProbe]:
        config = declaration.configs[0]
        try:
            one = order.probe(declaration, config, cell, arena, cell.arch())
        except InfrastructureError as error:
            one = OrderProbe(declaration.ref, config.name, reason=str(error))
        said = f"{'order':10} {one.variant}: {one.reason or one.order} ({one.seconds:.1f} s)"
        console.print(said, highlight=False)
        return [one]

    probes = _in_cells(able, ask, 1)
    return replace(report, orders=tuple(probes), not_run=(*report.not_run, *not_run))


def _gradients(report: ProbeReport, request: Request, console: Console) -> ProbeReport:
    listed = roster(list(request.kernels) or None).declarations
    able, excluded = _able(
        [each for each in listed if each.gradients and each.gradients.order != GradientOrder()]
    )

    def ask(declaration: Declaration, cell: Cell, arena: Arena) -> list[GradientOrderProbe]:
        config, name = declaration.configs[0], declaration.ref
        try:
            asked = gradient_order.CellVariant(declaration, config, cell, arena, cell.arch())
            if next(turns[name]):
                with suppress(RuntimeError):  # the probe says what is wrong
                    gradient_order.build_rows(asked)
                return []
            probes = gradient_order.probe(asked)
        except InfrastructureError as error:
            probes = [GradientOrderProbe(name, config.name, error=str(error))]
        for one in probes:
            _say(one, console)
        if not probes:
            excluded.append((name, "no bound is derived for its declared orders here"))
        return probes

    turns = {declaration.ref: itertools.count() for declaration in able}
    builders = able if environment().device == "cuda" else []
    probes = _in_cells([*able, *builders], ask, _CELLS)
    not_run = [ProbeNotRun(f"orders of the backward of {ref}", why) for ref, why in excluded]
    return replace(report, gradient_orders=tuple(probes), not_run=(*report.not_run, *not_run))


def _able(
    declarations: Sequence[Declaration],
) -> tuple[list[Declaration], list[tuple[str, str]]]:
    """The variants that can run here, and the names of the others with their reasons."""
    reasons = [(declaration, excludes_here(declaration)) for declaration in declarations]
    able = [declaration for declaration, reason in reasons if reason is None]
    return able, [(declaration.ref, reason) for declaration, reason in reasons if reason]


def _in_cells(
    able: Sequence[Declaration],
    ask: Callable[[Declaration, Cell, Arena], list[P]],
    processes: int,
) -> list[P]:
    """What is found of each variant, with a cell and buffers of its own; so many at the same
    time."""
    if not able:
        return []
    fork_server = ForkServer(environment())

    def asked(declaration: Declaration) -> list[P]:
        cell, arena = Cell(fork_server), Arena()
        try:
            return ask(declaration, cell, arena)
        finally:
            cell.close()
            arena.close()

    try:
        with ThreadPoolExecutor(max(1, min(processes, cores() // 2))) as pool:
            return [one for found in pool.map(asked, able) for one in found]
    finally:
        fork_server.close()


def _show(report: ProbeReport, console: Console) -> None:
    for title, table in page.titled(report):
        console.print(terminal.render(table, title))
    for line in page.details(report):
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    for entry in report.not_run:
        console.print(
            f"{entry.name}: not run: {entry.reason}", style="dim", markup=False, highlight=False
        )
