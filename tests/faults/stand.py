"""The stand: faulty and shipped kernels before the judge, without a campaign."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from unittest.mock import patch

import torch
from torch import Tensor

from references.attention import backward, forward
from tests.faults.fault import TRITON_BACKWARD, Fault
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell import arena as memory
from verify.cell.process import ROOT, Cell, Reply
from verify.evidence import Recorder, Verdict
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import Group
from verify.problem import Problem
from verify.problem.inputs import Inputs, dequantised, dout, tensors
from verify.variant import Config, Declaration, Numerics, declaration_from

# What a test's `torch.zeros_like` leaves in an output.  The judge never fills one with it: it would
# hide what is not written.
_POISONS = memory.POISONS | {"zero": 0}
_LIVES = 3  # as a judge keeps
# what of a trial no run of a kernel changes
_SHARED = ("inputs", "expanded", "dout", "truth", "known_truth", "_kept")
# Kernels whose first launch in a process imports torch's compiler, which takes 4 s: right and wrong
# ones run in one process.
_SLOW_TO_START = ("flex_eager",)


def finest(declaration: Declaration) -> Config:
    """The config with the smallest tiles of keys."""
    return min(declaration.configs, key=lambda config: config.block_n or 64)


class _ManyFiles(Cell):
    """A cell whose process runs several kernel files.  They hold variants of the same names: a file
    is loaded again when another was loaded since."""

    def load(self, path: str) -> Reply:
        """Load that file, and forget the others."""
        self._loaded.clear()
        return super().load(path)


@dataclass
class Stand:
    """One judge, and the declarations of every kernel that was brought before it.  A context
    manager."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="faults-")))
    _declared: dict[str, Declaration] = field(default_factory=dict)
    _tried: dict[tuple[Problem, Config, str, Numerics], Trial] = field(default_factory=dict)
    _slow: _ManyFiles | None = None

    def __post_init__(self) -> None:
        self.judge = Judge(Recorder(self.folder, "faults"))

    def __enter__(self) -> Stand:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._slow is not None:
            self._slow.close()
        self.judge.close()

    def shipped(self, fault: Fault) -> Declaration:
        """The kernel as it is."""
        return self.load(ROOT / fault.file, fault.on_trial)

    def planted(self, fault: Fault) -> Declaration:
        """The kernel with the fault."""
        return self.load(fault.plant(self.folder), fault.on_trial)

    def pair(self, fault: Fault) -> tuple[Declaration, Declaration]:
        """The shipped Triton backward, and the same behind the forward with the fault."""
        behind, name = fault.plant_pair(self.folder / "pairs"), "triton-flash-backward"
        return self.load(ROOT / TRITON_BACKWARD, name), self.load(behind, name)

    def load(self, path: Path, variant: str) -> Declaration:
        """The declaration of a variant of that file, or of the only one for "".  Raises
        ValueError."""
        key = f"{path}@{variant}"
        if key not in self._declared:
            reply = self._cell(str(path)).load(str(path))
            if not reply.ok:
                raise ValueError(f"{path} does not load: {reply.status}: {reply.message}")
            found = [data for data in reply.data["variants"] if variant in ("", data["name"])]
            if len(found) != 1:
                raise ValueError(
                    f"{path} holds {', '.join(data['name'] for data in found)}: name one"
                )
            self._declared[key] = declaration_from(
                found[0], ref=found[0]["name"], path=str(path), source_hash=""
            )
        return self._declared[key]

    def afresh(self, declaration: Declaration) -> Declaration:
        """The same kernel, which will run in a process that has not seen it."""
        cell = self.judge.cells.pop(declaration.path, None)
        if cell is not None:
            cell.close()
        return declaration

    def verdicts(
        self, declaration: Declaration, config: Config, group: str, problem: Problem
    ) -> list[Verdict]:
        """The verdicts of one case."""
        return self.judge.judge(Target(declaration, config, problem.dtype, group), problem)

    def trial(
        self, declaration: Declaration, config: Config, group: Group, problem: Problem
    ) -> Trial:
        """One case, of which nothing is asked yet; what it shares with an earlier one of equal
        declarations is known."""
        key = (problem, config, group.entry, declaration.numerics)
        before, found = self._tried.get(key), self._trial(declaration, config, group.entry, problem)
        found.refuses = group.outside
        if before is not None:
            found.__dict__ |= {
                name: before.__dict__[name] for name in _SHARED if name in before.__dict__
            }
        self._tried[key] = found
        return found

    def _trial(
        self, declaration: Declaration, config: Config, entry: str, problem: Problem
    ) -> Trial:
        cell = self._cell(declaration.path)
        files = declaration.path if cell is not self._slow else "the slow ones"
        return Trial(
            declaration=declaration,
            config=config,
            problem=problem,
            cell=cell,
            arena=self.judge.arenas.of(files),
            arch=self.judge.arch,
            entry=entry,
        )

    def _cell(self, path: str) -> Cell:
        """The cell of that file among the judge's; a declaration is read where the kernel will
        run."""
        cells = self.judge.cells
        if Path(path).stem in _SLOW_TO_START:
            if self._slow is None:
                self._slow = _ManyFiles(self.judge.fork_server)
            return self._slow
        if path not in cells:
            while len(cells) >= _LIVES:
                cells.popitem(last=False)[1].close()
            cells[path] = Cell(self.judge.fork_server)
        cells.move_to_end(path)
        return cells[path]

    def run(
        self,
        declaration: Declaration,
        problem: Problem,
        *,
        given: Mapping[str, Tensor] | None = None,
        poison: str,
    ) -> Trial:
        """One run on the finest config over outputs filled with `poison`; `given` replaces q, k, v
        and dout.

        Whatever came of it is in the trial's run "common" and, of a backward, its run `saved`.
        """
        trial = self._trial(declaration, finest(declaration), declaration.entries[0], problem)
        if given is not None:
            others = {name: tensor for name, tensor in given.items() if name.startswith("descale_")}
            trial.__dict__["inputs"] = Inputs(given["q"], given["k"], given["v"], others)
            trial.__dict__["dout"] = given["dout"]
        with patch.object(memory, "POISONS", _POISONS):
            if trial.entry == "forward" or trial.saved.reply.ok:
                trial.run("common", poison=poison)
        return trial


def finished(trial: Trial) -> Launch | None:
    """The run of `Stand.run`, if there is one that ended well."""
    run = trial.launches.get("common")
    return run if run is not None and run.reply.ok else None


@cache
def exact(problem: Problem, entry: str) -> Mapping[str, Tensor]:
    """The fp64 values of what a test compares: O of a forward, dQ, dK and dV of a backward."""
    inputs, attention = (
        dequantised(problem, tensors(problem)),
        problem.attention,
    )
    if entry == "forward":
        return {"out": forward(*inputs, attention).out}
    found = backward(*inputs, dout(problem), attention)
    return {"dq": found.dq, "dk": found.dk, "dv": found.dv}


def passes_allclose(trial: Trial, atol: float = 1e-2) -> bool:
    """Whether a test that compares with `torch.allclose(atol=atol, rtol=0)` passes; it does not
    look at the LSE."""
    run = finished(trial)
    if run is None:
        return False
    wanted = exact(trial.problem, trial.entry)
    return all(
        torch.allclose(run.outputs[name].double(), want, atol=atol, rtol=0)
        for name, want in wanted.items()
    )
