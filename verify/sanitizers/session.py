"""A session: some cases of one variant, run in sequence in one sanitized process, and judged."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify.cell.arena import Arena
from verify.cell.process import Cell, Environment, InfrastructureError
from verify.cell.under_tool import Ended, ToolCell
from verify.judging.findings import Ruling
from verify.judging.run_checks import fault, held
from verify.judging.trial import Trial
from verify.machine.settings import WORKSPACES
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import ledger
from verify.sanitizers.bits import difference
from verify.sanitizers.exceptions import WAIVERS, Waiver
from verify.sanitizers.facts import CaseResult, Facts, Judgement, collect, judge
from verify.sanitizers.tool import LEDGER, OUTPUT, POISONED, Sanitizer
from verify.variant import Config, Declaration

# Seconds for one run of a kernel under a tool.  Builds do not count (`verify.sanitizers.building`),
# and the runs of problems of this size take a few seconds at most.
DEADLINE = 45.0
NOT_RUN = "not run"


@dataclass(frozen=True)
class Subject:
    """One variant, config and dtype, and its cases."""

    declaration: Declaration
    config: Config
    dtype: str
    cases: tuple[Case, ...]

    @property
    def id(self) -> str:
        return "-".join((self.declaration.ref, self.config.name, self.dtype))

    @property
    def entry(self) -> str:
        """The entry point that is tried: of a backward, it runs the forward too."""
        return "backward" if "backward" in self.declaration.entries else "forward"

    @property
    def repeats(self) -> bool:
        """Whether the variant declares that its runs have equal bits."""
        contract = self.declaration.contract
        backward = self.entry == "backward"
        return contract.deterministic_backward if backward else contract.deterministic

    def trial(self, problem: Problem, cell: Cell, arena: Arena) -> Trial:
        """A trial of one problem.  Its arch is not told, since no bound is computed."""
        return Trial(self.declaration, self.config, problem, cell, arena, arch="", entry=self.entry)

    def alone(self, case: Case) -> Subject:
        """The same subject with one case only."""
        return replace(self, cases=(case,))

    def times(self, number: int) -> Subject:
        """The same subject, each case so many times."""
        return replace(self, cases=self.cases * number)


@dataclass(frozen=True)
class Session:
    """One finished process: its tool, subject, judgement and wall time in seconds."""

    tool: str
    subject: Subject
    judgement: Judgement
    seconds: float
    facts: Facts = field(repr=False)
    built: float = 0.0  # seconds in which it compiled

    @property
    def hang(self) -> CaseResult | None:
        """The result of the case at which it did not answer."""
        return next((one for one in self.facts.results if one.status == "hang"), None)

    def not_run(self, reason: str) -> Session:
        """The same, as one that proves nothing because it was not run to its end."""
        return replace(self, judgement=Judgement(NOT_RUN, (f"not run: {reason}",)))


def never_run(tool: str, subject: Subject, reason: str) -> Session:
    """A session that was not begun."""
    facts = Facts(
        tool=tool,
        exit_code=None,
        summary=None,
        records=None,
        results=(),
        expected_cases=len(subject.cases),
    )
    return Session(tool, subject, Judgement(NOT_RUN), 0.0, facts).not_run(reason)


@dataclass
class Booth:
    """Runs sessions: the tool, the kernels' environment, and a folder for the tool's files."""

    sanitizer: Sanitizer
    environment: Environment
    folder: Path
    waivers: tuple[Waiver, ...] = WAIVERS

    def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
        """Run a subject's cases in one process under a tool.

        lane: a number that no other running session has.  name: unique; names the folder.
        """
        folder = (self.folder / tool / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = time.perf_counter()
        command = self.sanitizer.command(tool, folder, lane)
        environment = _sanitized(self.environment, folder, poisoned=tool != "initcheck")
        cell = ToolCell(environment, command, "verify.sanitizers.child")
        again = tool == POISONED and subject.repeats
        arena = Arena()
        results: list[CaseResult] = []
        doubt = ""
        try:
            for case in subject.cases:
                results.append(run_case(case, subject, cell, arena, again=again)[0])
        except Ended:
            # The tool can end the process at its first error; the number of results shows it.
            if cell.hung:
                results.append(CaseResult(case.id, "hang", f"hangs: {cell.hung}"))
            elif cell.refused:
                doubt = f"{case.id}: {cell.refused}"
        except InfrastructureError as error:
            doubt = str(error)
        finally:
            code = cell.finish()
            output = cell.output
            cell.close()
            arena.close()
        (folder / OUTPUT).write_text(output, encoding="utf-8")
        facts = replace(
            collect(tool, folder, code, results, len(subject.cases)),
            counted=self.counted and subject.declaration.family in ledger.FAMILIES,
        )
        if doubt:
            facts = replace(facts, doubts=(f"{doubt}: {output[-500:]}", *facts.doubts))
        valid = [w for w in self.waivers if w.version == self.sanitizer.version]
        seconds = time.perf_counter() - begun
        return Session(tool, subject, judge(facts, valid), seconds, facts, cell.built)

    @property
    def counted(self) -> bool:
        """Whether kernels are launched on a device, so that the ledger has them."""
        return self.environment.device == "cuda"


def _sanitized(environment: Environment, folder: Path, *, poisoned: bool) -> Environment:
    """Without torch's cache of allocations, with this lane's deadline, and with a ledger.

    poisoned: whether workspaces hold poison; they are not written otherwise.
    """
    variables = (
        *environment.variables,
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        (ledger.VARIABLE, str(folder / LEDGER)),
        (WORKSPACES, "poisoned" if poisoned else "unwritten"),
    )
    return replace(environment, variables=variables, patience=DEADLINE)


def rehearse(subject: Subject, cell: Cell) -> dict[str, Ruling]:
    """Run a subject's cases in a plain cell, which also fills the compilers' caches.

    Returns case id -> ruling for the cases that fail.  Once the kernel hangs, the other cases fail
    with that.
    """
    arena = Arena()
    failing: dict[str, Ruling] = {}
    hang: Ruling | None = None
    try:
        for case in subject.cases:
            if hang is None:
                result, ruling = run_case(case, subject, cell, arena)
                hang = _after(ruling, case) if result.status == "hang" else None
            else:
                ruling = hang
            if ruling.finding is not None:
                failing[case.id] = ruling
    finally:
        arena.close()
    return failing


def _after(ruling: Ruling, case: Case) -> Ruling:
    """The ruling of the cases after one that hangs."""
    assert ruling.finding is not None
    return Ruling(replace(ruling.finding, message=f"not run: the kernel hangs at {case.id}"))


def run_case(
    case: Case, subject: Subject, cell: Cell, arena: Arena, *, again: bool = False
) -> tuple[CaseResult, Ruling]:
    """Run one case; returns its result, and the first failing ruling of
    `verify.judging.run_checks`.

    again: run it a second time, with huge finite values and not NaN in outputs and workspaces, and
    compare bits.
    """
    trial = subject.trial(case.problem, cell, arena)
    for _, run, ruling in held(trial):
        if ruling.finding is not None:
            return CaseResult(case.id, run.reply.status, ruling.finding.message), ruling
    written = sum(tensor.numel() for tensor in trial.first.outputs.values())
    against, differs = "" if written else "its outputs have no element", ""
    if again:
        run = trial.run("again", poison="huge")
        ruling = fault(trial, run) or Ruling()
        if ruling.finding is not None:
            message = f"with huge values in outputs and workspaces: {ruling.finding.message}"
            return CaseResult(case.id, run.reply.status, message), ruling
        than = "a run with NaN"
        differs = difference(run.outputs, trial.first.outputs, than)
    return CaseResult(case.id, "ok", against, differs), Ruling()
