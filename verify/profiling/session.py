"""A session: some problems of one variant, run in sequence in one process under ncu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verify.cell.arena import Arena
from verify.cell.process import Environment, InfrastructureError, Reply
from verify.cell.under_tool import Ended, ToolCell
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.profiling.metrics import METRICS, KernelProfile, parse
from verify.profiling.tool import ProfileError, Profiler
from verify.variant import Config, Declaration

_PATIENCE = 900.0  # seconds for a run: ncu repeats a launch for each group of counters


@dataclass(frozen=True)
class Launch:
    """What to profile: a config on a problem, after the same launch to warm up."""

    config: Config
    problem: Problem


class _Cell(ToolCell):
    """marked: whether ncu profiles the runs to come."""

    marked = False

    def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
        return super().run(path, request | {"profile": self.marked}, arena)


def profile(
    profiler: Profiler,
    environment: Environment,
    declaration: Declaration,
    launches: Sequence[Launch],
    folder: Path,
    *,
    full: bool = True,
    metrics: Sequence[str] = METRICS,
) -> list[KernelProfile]:
    """Every kernel that the profiled launches started, in order; a launch can start several.

    folder: for ncu's report, which its own window can open.  Raises ProfileError, and
    InfrastructureError if the process does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = profiler.command(folder.resolve(), metrics, full=full)
    patient = replace(environment, patience=max(environment.patience, _PATIENCE))
    cell = _Cell(patient, prefix, "verify.profiling.child")
    arena = Arena()
    try:
        for one in launches:
            _launch(cell, arena, declaration, one)
    except Ended:
        raise ProfileError(f"the process ended under ncu: {cell.output}") from None
    except (ProfileError, InfrastructureError) as error:
        cell.finish()
        raise type(error)(f"{error}\n{cell.output}".strip()) from None
    finally:
        code = cell.finish()
        output = cell.output
        cell.close()
        arena.close()
    if code != 0:
        raise ProfileError(f"ncu ended with {code}: {output}")
    try:
        return parse(profiler.rows(folder))
    except ProfileError as error:
        raise ProfileError(f"{error}\n{output}".strip()) from None


def _launch(cell: _Cell, arena: Arena, declaration: Declaration, one: Launch) -> None:
    """Run the kernel twice, the second time under ncu's eyes.  Raises ProfileError if a run
    fails."""
    entry = "backward" if "backward" in declaration.entries else "forward"
    trial = Trial(declaration, one.config, one.problem, cell, arena, arch="", entry=entry)
    for marked in (False, True):
        cell.marked = marked
        reply = trial.run("profiled" if marked else "first").reply
        cell.marked = False
        if not reply.ok:
            raise ProfileError(
                f"{declaration.ref} {one.config.name} on {one.problem.name}: {reply.status}:"
                f" {reply.message}"
            )
