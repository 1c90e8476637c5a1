"""Skew: a kernel with seeded delays at its barriers gives the same bits for every seed, in repeats,
on other streams, beside other launches and at other occupancies.

It is a tool like those of compute-sanitizer, without one: it runs a subject's cases in a process
whose kernels have delays (`verify.sanitizers.delays`), and compares bits.  A missing barrier lets a
slow warp read what a fast one has overwritten, and delays make warps slow.  All seeds run one
binary, so a compiler's freedom cannot show.  A kernel that declares that its runs differ is only
run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify.cell.arena import Arena, Plan, side_name
from verify.cell.concurrent import LAUNCHES
from verify.cell.process import Cell, Environment, InfrastructureError
from verify.cell.under_tool import Ended, ToolCell
from verify.cell.ways import DELAYS, UNBUILT
from verify.judging.launch import Launch
from verify.judging.run_checks import fault, held
from verify.judging.trial import Trial
from verify.problem.case import Case
from verify.sanitizers.bits import Outputs, difference
from verify.sanitizers.facts import CaseResult, Facts, Judgement
from verify.sanitizers.records import Record
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import OUTPUT, SKEW

SEEDS = (1, 2, 3, 4, 5)
PROGRAM = "verify.sanitizers.delays"
NOT_DELAYED = "no barrier of it is known here: only repeats and streams were tried"
NOT_COMPARED = "declared not deterministic: bits were not compared"
_LARGEST = 32 << 20  # bytes of one run's buffers, for launches at the same time
DEADLINE = 30.0  # seconds for one run; builds do not count, and delays are of microseconds


@dataclass
class _Race:
    """The runs of a subject's cases.  delayed: launches with delays."""

    subject: Subject
    seeds: Sequence[int]
    records: list[Record] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    delayed: int = 0
    built: float = 0.0
    output: str = ""

    def run(self, environment: Environment) -> None:
        """Run every case, in one process."""
        # Triton 3.6 does not tell builds with delays from others in its cache.
        variables = (*environment.variables, ("TRITON_CACHE_DIR", str(_triton_cache())))
        own = replace(environment, variables=variables, patience=DEADLINE)
        cell = ToolCell(own, (), PROGRAM)
        arena = Arena()
        try:
            for case in self.subject.cases:
                record = self._case(case, cell, arena)
                self.records += [] if record is None else [record]
        except Ended:
            if cell.hung:
                self.results.append(CaseResult(case.id, "hang", f"hangs: {cell.hung}"))
                self.records.append(_record("Run", f"with delays it hangs: {cell.hung}"))
            else:
                told = ": ".join(filter(None, (case.id, cell.refused, cell.output[-500:])))
                self.doubts.append(f"the process ended before its last case: {told}")
        except InfrastructureError as error:
            self.doubts.append(f"{error}: {cell.output[-500:]}")
        finally:
            cell.finish()
            self.output = cell.output
            cell.close()
            arena.close()
            self.built = cell.built

    def _case(self, case: Case, cell: Cell, arena: Arena) -> Record | None:
        """What is wrong with a case."""
        trial = Trial(
            self.subject.declaration,
            self.subject.config,
            case.problem,
            cell,
            arena,
            arch="",
            entry=self.subject.entry,
        )
        for _, _, ruling in held(trial):
            if self._unbuilt(trial, case):
                return None
            if ruling.finding is not None:
                return _record("Run", f"seed 0: {ruling.finding.message}")
        for what, run, pairs in _runs(trial, self.seeds):
            self.delayed += int(run.reply.data.get("delayed", 0))
            if self._unbuilt(trial, case):
                return None
            failed = None if run is trial.first else fault(trial, run)
            if failed is not None and failed.finding is not None:
                return _record("Run", f"{what}: {failed.finding.message}")
            told = _difference(what, pairs) if self.subject.repeats else None
            if told is not None:
                return _record("Race", told)
        self.results.append(CaseResult(case.id, "ok"))
        return None

    def _unbuilt(self, trial: Trial, case: Case) -> bool:
        """Whether a launch of the case could not be compiled with delays, which is a doubt."""
        replies = (launch.reply for launch in trial.launches.values())
        why = next((reply.message for reply in replies if reply.status == UNBUILT), None)
        if why is not None:
            self.doubts.append(f"{case.id}: it does not compile with delays: {why}")
        return why is not None

    @property
    def judgement(self) -> Judgement:
        """Of all cases."""
        doubts = tuple(self.doubts)
        if self.records:
            return Judgement("faulty", doubts, tuple(self.records), len(self.records))
        if doubts:
            return Judgement("inconclusive", doubts)
        notes = ((NOT_DELAYED, not self.delayed), (NOT_COMPARED, not self.subject.repeats))
        return Judgement("clean", tuple(note for note, holds in notes if holds))


def race(
    environment: Environment,
    subject: Subject,
    seeds: Sequence[int] = SEEDS,
    *,
    folder: Path | None = None,
) -> Session:
    """Run a subject's cases with every seed, each up to the first run whose bits differ.

    folder: where the end of the process's output is kept, if anywhere.
    """
    begun = time.perf_counter()
    runs = _Race(subject, seeds)
    runs.run(environment)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTPUT).write_text(runs.output, encoding="utf-8")
    facts = Facts(
        tool=SKEW,
        exit_code=0,
        summary=None,
        records=tuple(runs.records),
        results=tuple(runs.results),
        expected_cases=len(subject.cases),
        doubts=tuple(runs.doubts),
    )
    seconds = time.perf_counter() - begun
    return Session(SKEW, subject, runs.judgement, seconds, facts, runs.built)


def _runs(
    trial: Trial, seeds: Sequence[int]
) -> Iterator[tuple[str, Launch, list[tuple[Outputs, Outputs]]]]:
    """The runs of a case: (which, the run, its outputs and those that they must equal)."""
    own = trial.first.outputs
    yield "the first run", trial.first, []
    for seed in seeds:
        run = trial.going(f"{DELAYS}{seed}", "huge" if seed % 2 else "nan")
        yield f"seed {seed}", run, [(run.outputs, own)]
    where = trial.plan(trial.entry)
    on_device = trial.cell.environment.device == "cuda"
    if not on_device or not isinstance(where, Plan) or where.size > _LARGEST:
        return
    yield "negated inputs", trial.negated, []
    run = trial.concurrent
    if run.reply.crowded:  # other processes can leave too little
        return
    sides: list[Outputs] = [
        {name: run.outputs[side_name(launch, name)] for name in own}
        for launch in range(LAUNCHES)
        if run.outputs
    ]
    pairs = [(side, trial.negated.outputs if i % 2 else own) for i, side in enumerate(sides)]
    yield f"{LAUNCHES} launches at once", run, pairs


def _triton_cache() -> Path:
    """The folder of Triton's builds with delays."""
    usual = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(usual) / "verify-delays"


def _record(kind: str, text: str) -> Record:
    return Record(tool=SKEW, kind=kind, level="Error", text=text, words=text)


def _difference(what: str, pairs: Sequence[tuple[Outputs, Outputs]]) -> str | None:
    """In words, where outputs have other bits than they must; None if nowhere."""
    told = (difference(outputs, wanted, "a run of seed 0") for outputs, wanted in pairs)
    differing = next(filter(None, told), None)
    return None if differing is None else f"a race: with delays of {what}, {differing}"
