"""Repeat: a second run on the same inputs gives the same bits, with other garbage in the outputs.

The first run finds NaN in its outputs and workspaces, the second huge finite values: a kernel that
reads them before it writes them gives other bits. There is no slack. Kernels that declare that
their runs differ (`deterministic`, `deterministic_backward`) are not judged.

Premises: none. Both runs compute the same function.
"""

from __future__ import annotations

import torch

from verify.cell.arena import Plan, bits, different
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.run_checks import fault
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.variant import Declaration


def judge(trial: Trial) -> Ruling:
    """Run again with huge finite values, not NaN, in outputs and workspaces, and compare bits."""
    again = trial.run("again", poison="huge")
    ruling = fault(trial, again)
    if ruling is not None:
        return ruling
    for name, before in trial.first.outputs.items():
        after = again.outputs[name]
        if torch.equal(bits(before), bits(after)):
            continue
        changed = different(before, after)
        if bool(changed.any()):
            at = first(changed)
            got, want = float(after[at]), float(before[at])
            message = (
                f"{name} differs between two runs on the same inputs: {want:.9g}, then {got:.9g} at"
                f" {place(name, at)}; {int(changed.sum())} of {changed.numel()} elements differ"
            )
            return convict("repeat", message, name=name, bad=changed, got=got, bound=want)
    return Ruling()


def launches(trial: Trial) -> tuple[Wanted, ...]:
    """The second run."""
    return (Wanted(trial, "again", poison="huge"),)


_ONE_IN = 8  # cases
_ONE_BESIDE = 32  # cases that are judged together
_CATCHES = "races, uninitialised reads, accumulation into outputs that are not cleared"


def forward_applies(declaration: Declaration) -> str | None:
    """Return the reason why another run of the forward may have other bits, or None."""
    return None if declaration.contract.deterministic else "declared not deterministic"


def backward_applies(declaration: Declaration) -> str | None:
    """Return the reason why another run of the backward may have other bits, or None."""
    return None if declaration.contract.deterministic_backward else "declared not deterministic"


def on_cuda(trial: Trial, eighth: int, largest: int | None = None) -> bool:
    """Whether further runs on CUDA judge this case: one in eight, whose buffers take at most
    `largest` bytes.  eighth: which one.

    Cases that are judged together have one shape and are in the same eighth.  One in 32 of them is
    judged by further runs: each costs as much as ten launches of one message, and other values
    make it no harder.
    """
    if trial.cell.environment.device != "cuda" or trial.problem.seed % _ONE_IN != eighth:
        return False
    if trial.number % _ONE_BESIDE:
        return False
    where = None if largest is None else trial.plan(trial.entry)
    return largest is None or (isinstance(where, Plan) and where.size <= largest)


ORACLES = (
    Oracle(
        name="repeat",
        group="accuracy",
        catches=_CATCHES,
        judge=judge,
        launches=launches,
        excludes=forward_applies,
        needs=frozenset(),
        rank=40,
    ),
    Oracle(
        name="repeat",
        group="gradients",
        catches=_CATCHES,
        judge=judge,
        launches=launches,
        excludes=backward_applies,
        needs=frozenset(),
        rank=40,
    ),
)
