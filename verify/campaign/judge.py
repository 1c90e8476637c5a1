"""The judge: it owns the cells, the arenas and the record, and turns a case into verdicts.

It does not depend on a test framework.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis.vendor.pretty import RepresentationPrinter

from verify.bundle import published
from verify.campaign.layout_diagnosis import Layouts
from verify.campaign.targets import Target
from verify.campaign.together import (
    STACKED,
    prepare,
    prepare_comparisons,
    prepare_gradients,
)
from verify.cell.arenas import Arenas
from verify.cell.discovery import environment
from verify.cell.process import Cell, ForkServer
from verify.evidence import INAPPLICABLE, Drawn, Evidence, Phase, Recorder, Verdict
from verify.evidence.known_failures import Xfail, Xfails
from verify.judging import aftermath
from verify.judging.by_rows import all_finite
from verify.judging.diagnosis import Diagnoses
from verify.judging.findings import Ruling
from verify.judging.history import Hearing, History
from verify.judging.run_checks import held
from verify.judging.together import Wanted, launch
from verify.judging.trial import Trial
from verify.machine.cores import own_threads
from verify.oracles import Oracle, files_of, groups, leading_oracle, of_group, oracles
from verify.problem import Problem
from verify.problem.case import Case, replay_command
from verify.problem.coverage import coverage_bins
from verify.variant import Declaration

# Cells that stay open at the same time, each with one kernel file loaded.  On a GPU each process
# holds a CUDA context of hundreds of megabytes.  On the CPU processes share most of their memory,
# and a fresh one has to import and warm up again.
_MAX_CELLS = {"cuda": 3, "cpu": 12}
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h
_AHEAD = 64  # cases that are launched before the first of them is judged
_BEST_EVERY = 8  # one case in 8 also gets the bound of the best arithmetic, for the report


@dataclass
class Judge:
    """Judges cases one at a time; close it at the end.

    remembered: the evidence of an earlier process of this run, whose passing verdicts are reused.
    xfails: known defects; met: those that showed (see `unexpected_failures`).  fork_server: starts
    the kernel processes; `close` closes it.
    """

    recorder: Recorder
    remembered: Evidence | None = None
    xfails: Xfails = field(default_factory=Xfails)
    fork_server: ForkServer = field(default_factory=lambda: ForkServer(environment()))
    met: list[Xfail] = field(default_factory=list)
    cells: OrderedDict[str, Cell] = field(default_factory=OrderedDict)
    arenas: Arenas = field(default_factory=Arenas)
    drawn: dict[tuple[str, str, str], int] = field(default_factory=dict)
    refused: dict[tuple[str, str, str], int] = field(default_factory=dict)
    histories: dict[str, History] = field(default_factory=dict)  # path of a kernel file -> history
    layouts: Layouts = field(default_factory=Layouts)
    diagnoses: Diagnoses = field(default_factory=Diagnoses)
    _arch: str = ""
    # what `_asked` returned, with what it depends on, which so stays alive
    _oracles: dict[tuple[int, str], tuple[Declaration, tuple[Oracle, ...], list[Oracle]]] = field(
        default_factory=dict
    )

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """A short text: Hypothesis prints a failing test's arguments, and warns of long ones."""
        printer.text(f"<{type(self).__name__}>")

    def __post_init__(self) -> None:
        torch.set_num_threads(own_threads())
        _keep_freed_memory()

    def close(self) -> None:
        """End the cells and record how many problems were drawn and refused."""
        for cell in self.cells.values():
            cell.close()
        self.fork_server.close()
        self.arenas.close()
        for (variant, dtype, group), drawn in sorted(self.drawn.items()):
            refused = self.refused.get((variant, dtype, group), 0)
            self.recorder.write(
                Drawn(variant=variant, dtype=dtype, group=group, drawn=drawn, refused=refused)
            )
        self.recorder.close()

    def judge_together(
        self, target: Target, problems: Sequence[Problem], phase: Phase = "generate"
    ) -> Generator[list[Verdict], None, None]:
        """Judge cases one after the other, as `judge` does, when they are asked for.

        Of `_AHEAD` cases the first launches are made by few messages, and references and bounds of
        those with one shape are computed together, before the first is judged.  Cases that were
        launched are judged even if the caller stops.
        """
        for start in range(0, len(problems), _AHEAD):
            part = problems[start : start + _AHEAD]
            ahead: dict[str, Trial] = {}
            if len(part) > 1 and target.group in STACKED:
                ahead = {t.problem.name: t for t in self._begun(target, part, phase, start)}
            try:
                for problem in part:
                    yield self.judge(target, problem, phase, ahead.pop(problem.name, None))
            except GeneratorExit:
                for trial in ahead.values():
                    self.judge(target, trial.problem, phase, trial)
                raise

    def _begun(
        self, target: Target, problems: Sequence[Problem], phase: Phase, start: int
    ) -> list[Trial]:
        """Trials that are launched and have what could be computed together; their begin is on
        record.  start: the number of the first."""
        fresh = [
            self._trial(target, problem, number)
            for number, problem in enumerate(problems, start)
            if not self._standing(_case(target, problem), target)
        ]
        trials = prepare(fresh)
        for ahead, trial in enumerate(trials):
            case = _case(target, trial.problem).id
            self.recorder.begin(case, phase, target.declaration.ref, ahead)
        launch(each for trial in trials for each in self._launches(target, trial))
        prepare_gradients(trials)
        prepare_comparisons(trials, self._asked(target))
        return trials

    def judge(
        self,
        target: Target,
        problem: Problem,
        phase: Phase = "generate",
        trial: Trial | None = None,
    ) -> list[Verdict]:
        """Judge one case: record its begin, run it, ask the group's oracles, record verdicts.

        trial: of a case whose begin is on record already.  Raises ValueError where a kernel would
        be convicted on an input that is not finite: the fault is the generator's.
        """
        case = _case(target, problem)
        key = (target.declaration.ref, target.dtype, target.group)
        standing = self._standing(case, target)
        if standing:  # already counted when it was judged
            return standing
        if phase == "generate":
            self.drawn[key] = self.drawn.get(key, 0) + 1
        if trial is None:
            self.recorder.begin(case.id, phase, target.declaration.ref)
            trial = self._trial(target, problem)
        rulings = [
            (name, self._explained(trial, ruling)) for name, ruling in self._rulings(target, trial)
        ]
        if any(ruling.finding for _, ruling in rulings):
            _require_finite(trial)
        if not trial.refuses and rulings[0][0] == "execution" and _refused(trial):
            self.refused[key] = self.refused.get(key, 0) + 1
        seconds = {name: round(spent, 6) for name, spent in trial.clock.seconds.items()}
        verdicts = [
            self._verdict(case, target, trial, name, ruling, phase, seconds)
            for name, ruling in rulings
        ]
        for incident in trial.hearing.aftermaths[:1]:
            ruling = aftermath.ruling(incident)
            verdict = self._verdict(case, target, trial, aftermath.ORACLE, ruling, phase, seconds)
            path = published(target.declaration.path)
            variant = aftermath.blamed(incident, case.variant, path)
            verdicts.append(replace(verdict, variant=variant, outcome=aftermath.outcome(incident)))
        with trial.clock.timed("record"):
            self.recorder.write_case(verdicts)
        return verdicts

    def _trial(self, target: Target, problem: Problem, number: int = 0) -> Trial:
        cell = self._cell(target.declaration)
        history = self.histories.setdefault(target.declaration.path, History())
        return Trial(
            declaration=target.declaration,
            config=target.config,
            problem=problem,
            cell=cell,
            arena=self.arenas.of(target.declaration.path),
            arch=self.arch,
            entry=groups()[target.group].entry,
            refuses=groups()[target.group].outside,
            with_best=problem.seed % _BEST_EVERY == 0,
            hearing=Hearing(_case(target, problem).id, history),
            number=number,
        )

    def restart_process(self, declaration: Declaration) -> None:
        """End the process of the kernel's file; its next case runs in a fresh process."""
        self._cell(declaration).restart()

    def unexpected_failures(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The failing verdicts that no known defect explains; records the known defects that showed
        in `met`."""
        self.met += filter(None, map(self.xfails.expecting, verdicts))
        return self.xfails.unexpected(verdicts)

    def _rulings(self, target: Target, trial: Trial) -> list[tuple[str, Ruling]]:
        """Each oracle's ruling in order.

        If the launch itself fails, the group's other oracles are not asked.
        """
        rulings: list[tuple[str, Ruling]] = []
        if not trial.refuses:
            launch(self._launches(target, trial))
            rulings += [(name, ruling) for name, _, ruling in held(trial)]
            if len(rulings) < 2:  # execution failed, so memory was not checked
                return rulings
        return rulings + [(oracle.name, oracle.rule(trial)) for oracle in self._asked(target)]

    def _asked(self, target: Target) -> list[Oracle]:
        """The oracles that judge a target's cases."""
        key = (id(target.declaration), target.group)
        known = self._oracles.get(key)
        if known is None or known[1] is not oracles():
            asked = [
                oracle
                for oracle in of_group(target.group)
                if oracle.excludes_variant(target.declaration) is None
            ]
            self._oracles[key] = known = (target.declaration, oracles(), asked)
        return known[2]

    def _launches(self, target: Target, trial: Trial) -> list[Wanted]:
        """The launches of a case that are known before the first one."""
        more = [each for oracle in self._asked(target) for each in oracle.wanted(trial)]
        return [Wanted(trial), *more]

    def _explained(self, trial: Trial, ruling: Ruling) -> Ruling:
        """The ruling, with what its finding can say of the cause."""
        told = self.layouts.explained(trial, ruling)
        return told if told is not ruling else self.diagnoses.explained(trial, ruling)

    def _standing(self, case: Case, target: Target) -> list[Verdict]:
        """The verdicts of an earlier process of this run, if every applicable oracle has judged the
        case and none has convicted; else []."""
        if self.remembered is None or case.id not in self.remembered.judged:
            return []
        names = [oracle.name for oracle in self._asked(target)]
        verdicts = [self.remembered.verdict_of(case.id, name) for name in names]
        standing = [
            verdict for verdict in verdicts if verdict is not None and verdict.outcome != "fail"
        ]
        return standing if len(standing) == len(names) else []

    @property
    def arch(self) -> str:
        """The architecture that kernels run on, such as "sm_90" or "cpu"."""
        if not self._arch:
            probe = Cell(self.fork_server)
            self._arch = probe.arch()
            probe.close()
        return self._arch

    def _cell(self, declaration: Declaration) -> Cell:
        """The cell of the kernel's file.  If too many are open, the least recently used one is
        closed."""
        if declaration.path not in self.cells:
            while len(self.cells) >= _MAX_CELLS[environment().device]:
                path, cell = self.cells.popitem(last=False)
                cell.close()
                self.arenas.drop(path)
            self.cells[declaration.path] = Cell(self.fork_server)
            self.histories[declaration.path] = History()  # a new cell counts processes from 1
        self.cells.move_to_end(declaration.path)
        return self.cells[declaration.path]

    def _verdict(
        self,
        case: Case,
        target: Target,
        trial: Trial,
        oracle: str,
        ruling: Ruling,
        phase: Phase,
        seconds: dict[str, float],
    ) -> Verdict:
        finding, skipped = ruling.finding, ruling.inapplicable
        if finding is not None:
            files = [published(str(path)) for path in files_of(case.group)]
            finding = replace(finding, replay=replay_command(case.id, files))
        if finding is not None and not finding.before_count:
            before = trial.hearing.before
            finding = replace(finding, before=before.cases, before_count=before.count)
        return Verdict(
            case=case.id,
            variant=case.variant,
            config=case.config,
            dtype=target.dtype,
            oracle=oracle,
            group=case.group,
            outcome="fail" if finding else "pass" if skipped is None else "inapplicable",
            phase=phase,
            problem=case.problem.name,
            seconds=seconds,
            measures=dict(ruling.measures),
            observed={INAPPLICABLE: skipped} if skipped else dict(ruling.observed),
            bins=tuple(sorted(coverage_bins(case.problem, target.config)))
            if oracle == leading_oracle(case.group)
            else (),
            finding=finding,
        )


def _case(target: Target, problem: Problem) -> Case:
    return Case(target.declaration.ref, target.config.name, target.group, problem)


def _refused(trial: Trial) -> bool:
    """Whether the kernel refused a problem inside its support."""
    if trial.entry == "backward" and not trial.saved.reply.ok:
        return trial.saved.reply.status == "unsupported"
    return trial.first.reply.status == "unsupported"


def _require_finite(trial: Trial) -> None:
    """No oracle's premise holds where an input is an infinity: raises ValueError."""
    for name, tensor in trial.inputs.named.items():
        if not all_finite(tensor):
            raise ValueError(
                f"{trial.problem.name}: {name} holds what is not finite, so no kernel can be judged"
                " on it; the distribution has a fault"
            )


def _keep_freed_memory() -> None:
    """Make glibc keep freed tensors: mapping megabytes again costs more than computing on them."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)
