"""Invariance: measure whether bits repeat over other garbage, in other batches, for fewer heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.cell.arena import POISONS, different
from verify.judging.measuring import Measured, checked, plain, run_probe
from verify.judging.trial import Trial
from verify.problem.inputs import Inputs

# Parts of the batch run alone.
NEEDS = frozenset({Premise.POSITION_FREE_SCORES, Premise.FACTORS_BY_HEAD})
_RUNS = 5
_SAME, _DIFFERENT = "bitwise the same", "differs"


def measure(trial: Trial) -> list[Measured]:
    """Measure repetition, batch invariance and head invariance of a forward."""
    if not plain(trial) or not trial.problem.seqlen_q:
        return []
    contract = trial.declaration.contract
    found = [repetition(trial, contract.deterministic)]
    if trial.problem.batch > 1:
        found += [placement(trial, "batch invariance", _batches(trial), contract.batch_invariant)]
        found += [placement(trial, "head invariance", _heads(trial), False)]
    return found


def repetition(trial: Trial, promised: bool, name: str = "repetition") -> Measured:
    """Compare `_RUNS` runs on the same inputs, with different garbage in outputs and workspaces
    (see `verify/cell/arena.py`)."""
    kinds = list(POISONS) if promised else ["nan"]
    strays: list[str] = []
    for number in range(1, _RUNS):
        run = checked(trial, trial.run(f"repeated{number}", poison=kinds[number % len(kinds)]))
        for output, before in trial.first.outputs.items():
            count = int(different(before, run.outputs[output]).sum())
            if count:
                strays.append(
                    f"run {number + 1} differs from the first in {count} of {before.numel()}"
                    f" elements of {output}"
                )
    return Measured(
        name=name,
        word=f"{_DIFFERENT if strays else _SAME} in {_RUNS} runs",
        declared=f"{_SAME} in {_RUNS} runs" if promised else "free to differ",
        contradicts=promised and bool(strays),
        evidence=strays[0] if strays else "",
    )


@dataclass(frozen=True)
class Placement:
    """A part of the batch as a separate problem: its sequences in order, and its key head (None:
    all)."""

    sequences: Sequence[int]
    head: int | None = None

    def heads(self, heads_kv: int) -> list[int]:
        """Return the key heads of the part."""
        return list(range(heads_kv)) if self.head is None else [self.head]


def _batches(trial: Trial) -> list[Placement]:
    last = trial.problem.batch - 1
    return [
        Placement([0]),
        Placement([last]),
        Placement([last, 0]),
        Placement([0, *range(last, -1, -1), 0]),
    ]


def _heads(trial: Trial) -> list[Placement]:
    everyone = range(trial.problem.batch)
    return [Placement(everyone, head) for head in sorted({0, trial.problem.heads_kv - 1})]


def placement(trial: Trial, name: str, placements: Sequence[Placement], promised: bool) -> Measured:
    """Measure whether every part gives the bits that it has in the whole."""
    strays: list[str] = []
    for number, part in enumerate(placements):
        other = _part(trial, f"{name} {number}", part)
        wanted = _taken(trial, trial.first.outputs, part)
        for output, got in other.first.outputs.items():
            count = int(different(got, wanted[output]).sum())
            if count:
                where = f"sequences {list(part.sequences)}, {other.problem.heads_q} heads"
                strays.append(
                    f"{where}: {count} of {got.numel()} elements of {output} differ from those in"
                    " the batch"
                )
    word = (
        f"{_DIFFERENT} in {len(set(strays))} of {len(placements)} placements" if strays else _SAME
    )
    steady = trial.declaration.contract.deterministic
    return Measured(
        name=name,
        word=word,
        declared=_SAME if promised else "free to differ",
        contradicts=promised and steady and bool(strays),
        evidence=strays[0] if strays else "",
    )


def _part(trial: Trial, tag: str, part: Placement) -> Trial:
    p = trial.problem
    heads = part.heads(p.heads_kv)
    problem = p.but(batch=len(part.sequences), heads_kv=len(heads), heads_q=len(heads) * p.group)
    stored = {
        name: tensor for name, tensor in trial.inputs.named.items() if name in ("q", "k", "v")
    }
    others = {
        name: (tensor if p.quantisation.shared else tensor[list(part.sequences)][:, heads])
        for name, tensor in trial.inputs.others.items()
    }
    taken = _taken(trial, stored, part)
    return run_probe(trial, tag, problem, Inputs(taken["q"], taken["k"], taken["v"], others))


def _taken(trial: Trial, tensors: Mapping[str, Tensor], part: Placement) -> dict[str, Tensor]:
    """Return the part's sequences and heads of tensors (batch, heads_q or heads_kv, ...); query
    heads follow their key head."""
    p = trial.problem
    found = {}
    for name, tensor in tensors.items():
        chosen = torch.tensor(part.heads(p.heads_kv))
        if name not in ("k", "v"):
            chosen = (chosen[:, None] * p.group + torch.arange(p.group)).flatten()
        found[name] = tensor[list(part.sequences)][:, chosen]
    return found
