"""ConSan: Triton's own sanitizer of concurrency, as a tool like those of compute-sanitizer.

Triton builds a kernel with checks in it: who may see which tile of shared or tensor memory, at
which phase each mbarrier is, and whether all wait for each other.  A check that fails is a failed
assertion, which ends the launch.  So it sees what compute-sanitizer does not: a tile that the copy
engine still writes, an operand that a wgmma still reads, a wait that was forgotten, in clusters
too.  It has one logical thread for each partition of a kernel, and sees no missing barrier among
the warps of one.

A process is clean only if five facts agree: no assertion failed, it ended with 0, every case was
answered with "ok" over outputs that were all written, each run launched a kernel, and the binaries
are other ones than without instrumentation (`verify.sanitizers.binaries`).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verify.cell.arena import Arena
from verify.cell.process import Environment, InfrastructureError
from verify.cell.under_tool import Ended, ToolCell
from verify.machine import other_triton
from verify.sanitizers import algebra, binaries, ledger
from verify.sanitizers.assertions import read_assertions
from verify.sanitizers.exceptions import LIMITS, Limit
from verify.sanitizers.facts import CaseResult, Facts, Judgement, case_doubts
from verify.sanitizers.records import Record
from verify.sanitizers.session import Session, Subject, run_case
from verify.sanitizers.tool import CONSAN, FPSAN, LEDGER, OUTPUT
from verify.variant import Declaration

PROGRAM = "verify.sanitizers.instrumented_child"
DEADLINE = 120.0  # seconds for one run; builds do not count
FAMILIES = frozenset({"gluon", "triton"})  # of the collection, which Triton compiles
_OUTPUT = 8 << 20  # bytes of output that are read: a line for each thread that fails
_NAMES = re.compile("triton|gluon", re.IGNORECASE)  # in a file of a kernel that Triton compiles


def excludes(tool: str, declaration: Declaration) -> str | None:
    """Why a variant is not tried under an instrumenting tool, or None."""
    if declaration.family not in FAMILIES and not _names_triton(declaration):
        return f"{tool} instruments what Triton compiles"
    ctas = max((int(dict(c.options).get("ctas", 1)) for c in declaration.configs), default=1)
    if tool == FPSAN:
        return algebra.excludes(declaration)
    if tool == CONSAN and ctas > 1:
        return (
            "ConSan of Triton 3.8 does not know the barrier of a cluster, and accuses right kernels"
        )
    return None


def _names_triton(declaration: Declaration) -> bool:
    try:
        text = Path(declaration.path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return _NAMES.search(text) is not None


def sanitize(tool: str, environment: Environment, subject: Subject, folder: Path) -> Session:
    """Run a subject's cases in one process under an instrumenting tool, and judge it.

    folder: where its files are kept.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.perf_counter()
    cell = ToolCell(prepared(tool, environment, folder), (), PROGRAM)
    arena = Arena()
    results: list[CaseResult] = []
    differing: list[Record] = []
    doubt = ""
    case = None
    try:
        for case in subject.cases:
            if tool == FPSAN:
                result, record = algebra.compare(case, subject, cell, arena)
                differing += [record] if record is not None else []
                results.append(result)
            else:
                results.append(run_case(case, subject, cell, arena)[0])
    except Ended:
        assert case is not None
        if cell.hung:
            results.append(CaseResult(case.id, "hang", f"hangs: {cell.hung}"))
        else:
            results.append(CaseResult(case.id, "ended", cell.refused))
    except InfrastructureError as error:
        doubt = str(error)
    finally:
        code = cell.finish()
        output = cell.printed(_OUTPUT)
        cell.close()
        arena.close()
    (folder / OUTPUT).write_text(output, encoding="utf-8", errors="replace")
    facts = Facts(
        tool=tool,
        exit_code=code,
        summary=None,
        records=(*read_assertions(output, tool), *differing),
        results=tuple(results),
        expected_cases=len(subject.cases),
        launches=ledger.read(folder / LEDGER),
        counted=environment.device == "cuda",
        doubts=(f"{doubt}: {output[-500:]}",) if doubt else (),
    )
    judgement = judged(facts, binaries.read(folder / LEDGER))
    session = Session(tool, subject, judgement, time.perf_counter() - begun, facts, cell.built)
    limit = limit_of(tool, output) if judgement.outcome == "inconclusive" else None
    return session if limit is None else session.not_run(limit.reason)


def limit_of(tool: str, output: str) -> Limit | None:
    """The declared limit of this tool's version that the output of a process shows, if any."""
    version = other_triton.version() or ""
    return next((limit for limit in LIMITS if limit.covers(tool, version, output)), None)


def prepared(tool: str, environment: Environment, folder: Path) -> Environment:
    """The environment of a process under that tool, whose ledger lies in `folder`."""
    variables = (
        *environment.variables,
        (binaries.MODE, tool),
        ("CUDA_LAUNCH_BLOCKING", "1"),  # a failing launch raises where it is made
        (ledger.VARIABLE, str(folder / LEDGER)),
    )
    return replace(environment, variables=variables, patience=DEADLINE)


def judged(facts: Facts, built: Sequence[binaries.Built] | None) -> Judgement:
    """The judgement that follows from the facts and from the process's builds."""
    if facts.tool == FPSAN:
        return algebra.judged(facts, built)
    records = facts.records or ()
    failing = [result for result in facts.results if result.status != "ok"]
    doubts = list(facts.doubts)
    if records and failing:
        return Judgement("faulty", tuple(doubts), records, len(records))
    if records:
        doubts.append(f"{len(records)} assertions failed, and every launch ended well")
    if facts.exit_code != 0:
        code = "a kill" if facts.exit_code is None else f"exit code {facts.exit_code}"
        doubts.append(f"it ended with {code}")
    doubts += case_doubts(facts)
    if facts.counted:
        doubts += binaries.doubts(None if built is None else tuple(built))
    if doubts:
        return Judgement("inconclusive", tuple(doubts), records, len(records))
    return Judgement("clean")
