"""Refusal: just outside its support a kernel raises `Unsupported`, names the argument, and writes
nothing.

One argument of the problem is just outside the declared support. The kernel must raise
`Unsupported` with the name of that argument, before it touches any memory: a wrong result without
an error, a crash and another exception are all worse than a refusal. There is no slack. Kernels
that declare no support are not judged.

Premises: none. The kernel computes nothing.
"""

from __future__ import annotations

from verify.cell.arena import unwritten
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem import refusal


def judge(trial: Trial) -> Ruling:
    """Check that the kernel refuses, names the right argument and touches no memory."""
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


_CATCHES = "wrong results without an error, and crashes, outside the declared support"

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
