"""Repeat: the same inputs again, over other garbage in the outputs, give the same bits."""

from __future__ import annotations

from torch import Tensor

from verify.memory import bits
from verify.oracles import Oracle
from verify.oracles.execution import execution, memory
from verify.trial import Ruling, Trial, convict, first, place


def first_difference(one: dict[str, Tensor | None], two: dict[str, Tensor | None]) -> tuple[str, Tensor, Tensor, Tensor] | None:
    """The first of some named pairs of tensors that differ bitwise: its name, both, and where."""
    for name, tensor in one.items():
        other = two[name]
        if tensor is not None and other is not None:
            different = bits(tensor) != bits(other)
            if bool(different.any()):
                return name, tensor, other, different
    return None


def judge(trial: Trial) -> Ruling:
    """Run again with huge finite values, not NaN, in the outputs: what reads them before writing shows."""
    again = trial.run("again", poison="huge")
    for ruling in (execution(trial, again), memory(trial, again)):
        if ruling.finding is not None:
            return ruling
    one, two = ({"out": run.out, "lse": run.lse} for run in (trial.first, again))
    found = first_difference(one, two)
    if found is None:
        return Ruling()
    name, a, b, different = found
    at = first(different)
    got, want = float(b[at]), float(a[at])
    message = (
        f"{name} differs between two runs on the same inputs: {want:.9g}, then {got:.9g} at {place(name, at)}; "
        f"{int(different.sum())} of {different.numel()} elements differ"
    )
    return convict("repeat", message, name=name, bad=different, got=got, bound=want)


ORACLE = Oracle(
    name="repeat",
    group="accuracy",
    catches="races, uninitialised reads and outputs that are accumulated into",
    judge=judge,
    applies=lambda declaration: None if declaration.contract.deterministic else "declared not deterministic",
    rank=40,
)
