"""Repeat: the same inputs again, over other garbage in the outputs, give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.evidence import Finding
from verify.oracles import Oracle
from verify.oracles.execution import execution, memory
from verify.trial import Ruling, Trial, first_place


def differing_bits(first: Tensor, second: Tensor) -> Tensor:
    """Where two tensors of one dtype differ in their bits."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    return first.contiguous().view(integer) != second.contiguous().view(integer)


def first_difference(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> tuple[str, Tensor] | None:
    """The first of some named pairs of tensors that differ bitwise, and where."""
    for name, tensor in first.items():
        other = second[name]
        if tensor is not None and other is not None:
            different = differing_bits(tensor, other)
            if bool(different.any()):
                return name, different
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
    name, different = found
    count, spot = int(different.sum()), tuple(different.nonzero()[0])
    a, b = one[name], two[name]
    assert a is not None
    assert b is not None
    where = first_place(name, different)
    message = (
        f"{name} differs between two runs on the same inputs: {float(a[spot]):.9g}, then {float(b[spot]):.9g} at {where}; "
        f"{count} of {different.numel()} elements differ"
    )
    got, want = float(b[spot]), float(a[spot])
    return Ruling(
        Finding(oracle="repeat", message=message, got=got, bound=want, where=where, count=count, total=different.numel())
    )


ORACLE = Oracle(
    name="repeat",
    group="accuracy",
    catches="races, uninitialised reads and outputs that are accumulated into",
    judge=judge,
    applies=lambda declaration: None if declaration.contract.deterministic else "declared not deterministic",
    rank=40,
)
