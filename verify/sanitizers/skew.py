"""Skew: a kernel with seeded delays at its barriers gives the same bits for every seed, in repeats,
on other streams, beside other launches and at other occupancies.

It is a tool like those of compute-sanitizer, without one: it runs a subject's cases in a process
for each seed (`verify.sanitizers.delays`) and compares bits.  A missing barrier lets a slow warp
read what a fast one has overwritten, and delays make warps slow.  All seeds run one binary, so a
compiler's freedom cannot show.  A kernel that declares that its runs differ is only run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from verify.cell.arena import Arena, Plan, different, side_name
from verify.cell.concurrent import LAUNCHES
from verify.cell.process import Cell, Environment, InfrastructureError
from verify.cell.under_tool import Ended, ToolCell
from verify.judging.findings import Ruling, first, place
from verify.judging.launch import Launch
from verify.judging.run_checks import fault, held
from verify.judging.trial import Trial
from verify.problem.case import Case
from verify.sanitizers.delays import VARIABLE
from verify.sanitizers.facts import CaseResult, Facts, Judgement
from verify.sanitizers.records import Record
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import SKEW

SEEDS = (1, 2, 3, 4, 5)
PROGRAM = "verify.sanitizers.delays"
NOT_DELAYED = "no barrier of it is known here: only repeats, streams and occupancies were tried"
NOT_COMPARED = "declared not deterministic: bits were not compared"
_LARGEST = 32 << 20  # bytes of one run's buffers, for launches at the same time
_PATIENCE = 3.0

Outputs = Mapping[str, Tensor]


@dataclass
class _Race:
    """The runs of a subject.  first: outputs of a case's first run, and with inputs negated."""

    subject: Subject
    environment: Environment
    first: dict[tuple[str, str], tuple[int, Outputs]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    delayed: int = 0

    @property
    def entry(self) -> str:
        return "backward" if "backward" in self.subject.declaration.entries else "forward"

    @property
    def repeats(self) -> bool:
        contract = self.subject.declaration.contract
        return (
            contract.deterministic_backward if self.entry == "backward" else contract.deterministic
        )

    def run(self, seed: int) -> None:
        """Run every case with that seed, in one process."""
        variables = (*self.environment.variables, (VARIABLE, str(seed)))
        patience = self.environment.patience * _PATIENCE
        environment = replace(self.environment, variables=variables, patience=patience)
        cell = ToolCell(environment, (), PROGRAM)
        arena = Arena()
        try:
            for case in self.subject.cases:
                self._case(case, seed, cell, arena)
        except Ended:
            self.doubts.append(f"the process of seed {seed} ended before its last case")
        except InfrastructureError as error:
            self.doubts.append(f"{error}: {cell.output[-500:]}")
        finally:
            cell.finish()
            cell.close()
            arena.close()

    def _case(self, case: Case, seed: int, cell: Cell, arena: Arena) -> None:
        trial = Trial(
            self.subject.declaration,
            self.subject.config,
            case.problem,
            cell,
            arena,
            arch="",
            entry=self.entry,
        )
        for _, _, ruling in held(trial):
            if ruling.finding is not None:
                return self._record("Run", f"seed {seed}: {ruling.finding.message}")
        for what, inputs, run, outputs in _runs(trial, self.environment.device):
            self.delayed += int(run.reply.data.get("delayed", 0))
            failed = _failed(trial, run)
            if failed is not None and failed.finding is not None:
                return self._record("Run", f"seed {seed}, {what}: {failed.finding.message}")
            told = _difference(what, seed, outputs, *self._kept(case, inputs, seed, outputs))
            if told and self.repeats:
                return self._record("Race", told)
        self.results.append(CaseResult(case.id, "ok"))
        return None

    def _kept(self, case: Case, inputs: str, seed: int, outputs: Outputs) -> tuple[int, Outputs]:
        return self.first.setdefault((case.id, inputs), (seed, outputs))

    def _record(self, kind: str, text: str) -> None:
        self.records.append(Record(tool=SKEW, kind=kind, level="Error", text=text, words=text))


def race(environment: Environment, subject: Subject, seeds: Sequence[int] = SEEDS) -> Session:
    """Run a subject's cases with every seed, up to the first at which bits differ."""
    begun = time.perf_counter()
    runs = _Race(subject, environment)
    for seed in seeds:
        runs.run(seed)
        if runs.records or runs.doubts or not runs.delayed:
            break
    facts = Facts(
        tool=SKEW,
        exit_code=0,
        summary=None,
        records=tuple(runs.records),
        results=tuple(runs.results),
        expected_cases=len(subject.cases),
        doubts=tuple(runs.doubts),
    )
    return Session(SKEW, subject, _judgement(runs), time.perf_counter() - begun, facts)


def _judgement(runs: _Race) -> Judgement:
    records = tuple(runs.records)
    if records:
        return Judgement("faulty", tuple(runs.doubts), records, len(records))
    if runs.doubts:
        return Judgement("inconclusive", tuple(runs.doubts))
    notes = ((NOT_DELAYED, not runs.delayed), (NOT_COMPARED, not runs.repeats))
    return Judgement("clean", tuple(note for note, holds in notes if holds))


def _runs(trial: Trial, device: str) -> Iterator[tuple[str, str, Launch, Outputs]]:
    """The runs of a case: (which, "" or "negated" inputs, the run, its outputs)."""
    yield "the first run", "", trial.first, trial.first.outputs
    again = trial.run("again", poison="huge")
    yield "a repeat", "", again, again.outputs
    where = trial.plan(trial.entry)
    if device != "cuda" or not isinstance(where, Plan) or where.size > _LARGEST:
        return
    yield "a run of negated inputs", "negated", trial.negated, trial.negated.outputs
    run = trial.concurrent
    if run.reply.status == "out of memory":  # other processes can leave too little
        return
    for launch in range(LAUNCHES):
        outputs = {
            name: run.outputs[side_name(launch, name)]
            for name in trial.first.outputs
            if run.outputs
        }
        inputs = "negated" if launch % 2 else ""
        yield f"launch {launch + 1} of {LAUNCHES} at once", inputs, run, outputs


def _failed(trial: Trial, run: Launch) -> Ruling | None:
    """The ruling against a run that fails a check; the first run has passed them."""
    return None if run is trial.first else fault(trial, run)


def _difference(
    what: str, seed: int, outputs: Outputs, first_seed: int, wanted: Outputs
) -> str | None:
    """In words, where a run's outputs have other bits than the first run's; None if nowhere."""
    for name, want in wanted.items():
        changed = different(want, outputs[name])
        if bool(changed.any()):
            at = first(changed)
            return (
                f"a race: with delays of seed {seed}, {name} of {what} is"
                f" {float(outputs[name][at]):.9g} at {place(name, at)}, and"
                f" {float(want[at]):.9g} in the first run of seed {first_seed};"
                f" {int(changed.sum())} of {changed.numel()} elements differ"
            )
    return None
