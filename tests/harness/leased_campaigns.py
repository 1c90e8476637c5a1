"""Campaigns over workers, for the tests of leases: their results, and processes that can be
killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from verify.bundle import ROOT
from verify.campaign.leases import executor, sources
from verify.campaign.leases.coordinator import Plan
from verify.campaign.leases.plan import leases
from verify.campaign.leases.requests import Work
from verify.campaign.runner import RunRequest
from verify.evidence import Evidence

PLAIN = ROOT / "tests" / "sample_kernels" / "correct_plain.py"
Results = set[tuple[str, str, str]]


def results(evidence: Evidence) -> Results:
    """(case, oracle, outcome) of all that a campaign judged."""
    return {(each.case, each.oracle, each.outcome) for each in evidence.verdicts}


def plan(name: str, *kernels: Path, seeds: Sequence[int] = (0,), **choices: object) -> Plan:
    """A campaign of kernels, whose searches have all the time that they want."""
    request = RunRequest(
        kernels=kernels,
        workers="0",
        run_id=executor.RUN,
        profile="dev",
        only_dtypes=("float32",),
        **choices,  # type: ignore[arg-type]
    )
    spec = executor.Spec(
        campaign=name,
        arguments=tuple(request.arguments()),
        files=tuple(map(str, kernels)),
        variables={"VERIFY_SEARCH_SECONDS": "600", "VERIFY_SHRINK_SECONDS": "600"},
    )
    hashed = sources.sources_hash(kernels)
    return Plan(spec=spec, seeds=tuple(seeds), sources=hashed, exit_first=request.exit_first)


def undisturbed(asked: Plan, folder: Path) -> tuple[bytes, dict[tuple[str, str, str], int]]:
    """The evidence of all leases of a campaign, one after another in one session, without an
    engine; and the problems drawn, by variant, dtype and group."""
    session = executor.Executor(asked.spec, lambda line: None, folder)
    drawn: dict[tuple[str, str, str], int] = {}
    try:
        hello = session.start()
        found = [session.header]
        for lease in leases("kind", hello.units, asked.seeds):
            answer, lines = session.ask(Work(lease.id, lease.unit.node, lease.seed))
            assert not answer.errors, answer.errors
            found.append(lines)
            for variant, dtype, group, count, _ in answer.drawn:
                key = (variant, dtype, group)
                drawn[key] = drawn.get(key, 0) + count
        return b"".join(found), drawn
    finally:
        session.close()


def killed(pid: int, mine: Iterable[int]) -> bool:
    """Kill a process that descends from one of these; returns whether it was alive."""
    if pid <= 1 or not set(mine) & set(_ancestors(pid)):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def sessions(mine: Iterable[int]) -> list[int]:
    """The processes of leases' sessions that descend from these processes, by the scratch directory
    in which they run: a fork's command line is its starter's."""
    roots = set(mine)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            scratch = Path(os.readlink(folder / "cwd")).name
            pid = int(folder.name)
            if scratch.startswith("verify-") and roots & set(_ancestors(pid)):
                found.append(pid)
    return found


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return []
        pid = int(text.rpartition(")")[2].split()[1])
    return found
