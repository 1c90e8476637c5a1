"""Refusal: just outside its support a kernel says `Unsupported`, names the argument, and touches
nothing.

One argument of the problem lies just outside the declared support. The kernel must raise
`Unsupported` with the name of that argument, before it touches any memory: a silent wrong answer, a
crash and another exception are all worse than a refusal. There is no slack. Not asked of kernels
that declare no support.

Premises: none. Nothing is computed.
"""

from __future__ import annotations

from verify.cell.arena import unwritten
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem import refusal


def judge(trial: Trial) -> Ruling:
    """A silent wrong answer, a crash or another exception are all worse than a refusal."""
    excluded = refusal.excludes(trial.declaration.support, trial.problem)
    assert excluded is not None, f"inside the support: {trial.problem.name}"
    argument, reason = excluded
    run = trial.first
    where = f"{argument}: {reason}"
    if run.reply.status != "unsupported":
        got = "a result" if run.reply.ok else f"{run.reply.status}: {run.reply.message}"
        message = f"should refuse {where} with Unsupported, but gave {got}"
        return Ruling(
            Finding(
                oracle="refusal",
                message=message,
                got=got[:200],
                bound="Unsupported",
                where=argument,
            )
        )
    if run.reply.argument != argument:
        message = (
            f"refuses, but names {run.reply.argument!r}; the argument outside its support is"
            f" {where}"
        )
        return Ruling(
            Finding(
                oracle="refusal",
                message=message,
                got=run.reply.argument,
                bound=argument,
                where=argument,
            )
        )
    touched = [
        name
        for name, tensor in run.outputs.items()
        if tensor.numel() and not bool(unwritten(tensor, run.poison).all())
    ]
    if run.damage is not None or touched:
        what = run.damage.where if run.damage is not None else f"{touched[0]} was written"
        message = f"refuses {where}, but only after touching memory: {what}"
        return Ruling(
            Finding(
                oracle="refusal", message=message, got="touched", bound="untouched", where=argument
            )
        )
    return Ruling()


_CATCHES = "silent wrong answers and crashes where the kernel claims no support"

ORACLES = tuple(
    Oracle(
        name="refusal",
        group=group,
        catches=_CATCHES,
        judge=judge,
        excludes=lambda declaration: "declares no support" if declaration.undeclared else None,
        needs=frozenset(),
    )
    for group in ("refusal", "gradient_refusal")
)
