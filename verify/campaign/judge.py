"""Judge: holds the cells, the arena and the record, and turns a case into verdicts.  Knows no test
framework."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis.vendor.pretty import RepresentationPrinter

from verify.bundle import published
from verify.campaign.layout_diagnosis import Layouts
from verify.campaign.targets import Target
from verify.cell.arena import Arena
from verify.cell.discovery import environment
from verify.cell.process import Cell, ForkServer
from verify.evidence import INAPPLICABLE, Drawn, Evidence, Phase, Recorder, Verdict
from verify.evidence.known_failures import Xfail, Xfails
from verify.judging import aftermath
from verify.judging.findings import Ruling
from verify.judging.history import Hearing, History
from verify.judging.run_checks import held
from verify.judging.trial import Trial
from verify.machine.cores import threads
from verify.oracles import files_of, groups, leading_oracle, of_group
from verify.problem import Problem
from verify.problem.case import Case, replay_command
from verify.problem.coverage import coverage_bins
from verify.variant import Declaration

# Cells kept alive at once, each with its own kernel file loaded.  On a GPU a life holds a CUDA
# context, hundreds of megabytes of it; on the CPU it shares most of its memory, and a fresh one
# imports and warms up anew.
_LIVES = {"cuda": 3, "cpu": 12}
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h
_BEST_EVERY = 8  # one case in so many also gets the bound of the best arithmetic, for the report


@dataclass
class Judge:
    """Hears cases one at a time; close it at the end.

    remembered: an earlier run's evidence, whose passes stand.  xfails: known defects; met: those
    that showed (see `guilty`). fork server: what its cells are forked from, which it closes.
    """

    recorder: Recorder
    remembered: Evidence | None = None
    xfails: Xfails = field(default_factory=Xfails)
    fork_server: ForkServer = field(default_factory=lambda: ForkServer(environment()))
    met: list[Xfail] = field(default_factory=list)
    cells: OrderedDict[str, Cell] = field(default_factory=OrderedDict)
    arena: Arena = field(default_factory=Arena)
    drawn: dict[tuple[str, str, str], int] = field(default_factory=dict)
    refused: dict[tuple[str, str, str], int] = field(default_factory=dict)
    # of the cells, by the path of their file
    histories: dict[str, History] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=Layouts)
    _arch: str = ""

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """Short: Hypothesis prints a failing test's arguments, and warns of long ones."""
        printer.text(f"<{type(self).__name__}>")

    def __post_init__(self) -> None:
        torch.set_num_threads(threads(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
        _keep_freed_memory()

    def close(self) -> None:
        """End the cells and write what was counted."""
        for cell in self.cells.values():
            cell.close()
        self.fork_server.close()
        self.arena.close()
        for (variant, dtype, group), drawn in sorted(self.drawn.items()):
            refused = self.refused.get((variant, dtype, group), 0)
            self.recorder.write(
                Drawn(variant=variant, dtype=dtype, group=group, drawn=drawn, refused=refused)
            )
        self.recorder.close()

    def judge(self, target: Target, problem: Problem, phase: Phase = "generate") -> list[Verdict]:
        """Judge one case: record that it begins, run it, ask every oracle of the group, record the
        verdicts."""
        case = Case(target.declaration.ref, target.config.name, target.group, problem)
        key = (target.declaration.ref, target.dtype, target.group)
        standing = self._standing(case, target)
        if standing:  # it was counted when it was judged
            return standing
        if phase == "generate":
            self.drawn[key] = self.drawn.get(key, 0) + 1
        self.recorder.begin(case.id, phase, target.declaration.ref)
        cell = self._cell(target.declaration)
        trial = Trial(
            declaration=target.declaration,
            config=target.config,
            problem=problem,
            cell=cell,
            arena=self.arena,
            arch=self.arch,
            entry=groups()[target.group].entry,
            refuses=groups()[target.group].outside,
            with_best=problem.seed % _BEST_EVERY == 0,
            hearing=Hearing(case.id, self.histories.setdefault(target.declaration.path, History())),
        )
        rulings = [
            (name, self.layouts.told(trial, ruling))
            for name, ruling in self._rulings(target, trial)
        ]
        if not trial.refuses and rulings[0][0] == "execution" and _refused(trial):
            self.refused[key] = self.refused.get(key, 0) + 1
        verdicts = [
            self._verdict(case, target, trial, name, ruling, phase) for name, ruling in rulings
        ]
        for found in trial.hearing.aftermaths[:1]:
            ruling = aftermath.ruling(found)
            verdict = self._verdict(case, target, trial, aftermath.ORACLE, ruling, phase)
            path = published(target.declaration.path)
            variant = aftermath.blamed(found, case.variant, path)
            verdicts.append(replace(verdict, variant=variant, outcome=aftermath.outcome(found)))
        for verdict in verdicts:
            with trial.clock.timed("record"):
                self.recorder.write(verdict)
        return verdicts

    def alone(self, declaration: Declaration) -> None:
        """End the life of that kernel's file: the next case finds a process in which nothing has
        run."""
        self._cell(declaration).restart()

    def guilty(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Those that fail and are not expected to; the known defects among the others are put down
        as `met`."""
        self.met += filter(None, map(self.xfails.expecting, verdicts))
        return self.xfails.unexpected(verdicts)

    def _rulings(self, target: Target, trial: Trial) -> list[tuple[str, Ruling]]:
        """Each oracle's ruling in order, up to the first that makes the rest meaningless."""
        found: list[tuple[str, Ruling]] = []
        if not trial.refuses:
            found += [(name, ruling) for name, _, ruling in held(trial)]
            if len(found) < 2:  # of execution and memory
                return found
        for oracle in of_group(target.group):
            if oracle.excludes(target.declaration) is None:
                found.append((oracle.name, oracle.rule(trial)))
        return found

    def _standing(self, case: Case, target: Target) -> list[Verdict]:
        """Verdicts of an earlier process of this run, if every oracle that applies has spoken and
        none convicted."""
        if self.remembered is None or case.id not in self.remembered.judged:
            return []
        names = [
            oracle.name
            for oracle in of_group(target.group)
            if oracle.excludes(target.declaration) is None
        ]
        found = [self.remembered.verdict_of(case.id, name) for name in names]
        standing = [
            verdict for verdict in found if verdict is not None and verdict.outcome != "fail"
        ]
        return standing if len(standing) == len(names) else []

    @property
    def arch(self) -> str:
        """The architecture that kernels run on here."""
        if not self._arch:
            probe = Cell(self.fork_server)
            self._arch = probe.arch()
            probe.close()
        return self._arch

    def _cell(self, declaration: Declaration) -> Cell:
        """The cell of that kernel's file; the least recently used one makes room."""
        if declaration.path not in self.cells:
            while len(self.cells) >= _LIVES[environment().device]:
                self.cells.popitem(last=False)[1].close()
            self.cells[declaration.path] = Cell(self.fork_server)
            self.histories[declaration.path] = History()  # its lives are counted anew
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
            seconds={name: round(seconds, 6) for name, seconds in trial.clock.seconds.items()},
            measures=dict(ruling.measures),
            observed={INAPPLICABLE: skipped} if skipped else dict(ruling.observed),
            bins=tuple(sorted(coverage_bins(case.problem, target.config)))
            if oracle == leading_oracle(case.group)
            else (),
            finding=finding,
        )


def _refused(trial: Trial) -> bool:
    """Whether a run refused a problem inside the support."""
    if trial.entry == "backward" and not trial.saved.reply.ok:
        return trial.saved.reply.status == "unsupported"
    return trial.first.reply.status == "unsupported"


def _keep_freed_memory() -> None:
    """Tell glibc not to give every freed tensor back: mapping megabytes anew costs more than the
    arithmetic on them."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)
