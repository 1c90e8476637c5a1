"""Repeat: the same inputs again, over other garbage in the outputs, give the same bits."""

from __future__ import annotations

from verify.memory import bits
from verify.oracles import Oracle
from verify.oracles.execution import execution, memory
from verify.trial import Ruling, Trial, convict, first, place


def judge(trial: Trial) -> Ruling:
    """Run again with huge finite values, not NaN, in the outputs: what reads them before writing shows."""
    again = trial.run("again", poison="huge")
    for ruling in (execution(trial, again), memory(trial, again)):
        if ruling.finding is not None:
            return ruling
    for name in ("out", "lse"):
        before, after = getattr(trial.first, name), getattr(again, name)
        if before is None:
            continue
        different = bits(before) != bits(after)
        if bool(different.any()):
            at = first(different)
            got, want = float(after[at]), float(before[at])
            message = (
                f"{name} differs between two runs on the same inputs: {want:.9g}, then {got:.9g} at {place(name, at)}; "
                f"{int(different.sum())} of {different.numel()} elements differ"
            )
            return convict("repeat", message, name=name, bad=different, got=got, bound=want)
    return Ruling()


ORACLE = Oracle(
    name="repeat",
    group="accuracy",
    catches="races, uninitialised reads and outputs that are accumulated into",
    judge=judge,
    applies=lambda declaration: None if declaration.contract.deterministic else "declared not deterministic",
    rank=40,
)
