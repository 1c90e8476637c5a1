"""Refusal: just outside its support a kernel says `Unsupported`, names the argument, and touches nothing."""

from __future__ import annotations

from verify.evidence import Finding
from verify.memory import unwritten
from verify.oracles import Oracle
from verify.problem import Layout, Problem
from verify.trial import Ruling, Trial
from verify.variant import ROW_ALIGNMENT, Support


def expected_refusal(support: Support, problem: Problem) -> tuple[str, str]:
    """The argument that must be named, and why; raises ValueError for a problem inside the support."""
    refused = support.refusal(problem)
    if refused is not None:
        return refused
    for name, layout in problem.layouts.items():
        if name == "dout":  # only a backward sees it
            continue
        if support.layouts == "contiguous" and layout != Layout():
            return f"layout_{name}", f"{layout.name} is not contiguous"
        aligned = layout.aligned(problem.shapes[name], problem.format.itemsize, ROW_ALIGNMENT)
        if support.layouts == "aligned" and not aligned:
            return f"layout_{name}", f"rows of {layout.name} are not aligned to {ROW_ALIGNMENT} bytes"
    raise ValueError(f"inside the support: {problem.name}")


def judge(trial: Trial) -> Ruling:
    """A silent wrong answer, a crash or another exception are all worse than a refusal."""
    argument, reason = expected_refusal(trial.declaration.support, trial.problem)
    run = trial.first
    where = f"{argument}: {reason}"
    if run.reply.status != "unsupported":
        got = "a result" if run.reply.ok else f"{run.reply.status}: {run.reply.message}"
        message = f"should refuse {where} with Unsupported, but gave {got}"
        return Ruling(Finding(oracle="refusal", message=message, got=got[:200], bound="Unsupported", where=argument))
    if run.reply.argument != argument:
        message = f"refuses, but names {run.reply.argument!r}; the argument outside its support is {where}"
        return Ruling(Finding(oracle="refusal", message=message, got=run.reply.argument, bound=argument, where=argument))
    touched = [name for name, tensor in run.outputs.items() if tensor.numel() and not bool(unwritten(tensor, run.poison).all())]
    if run.damage is not None or touched:
        what = run.damage.where if run.damage is not None else f"{touched[0]} was written"
        message = f"refuses {where}, but only after touching memory: {what}"
        return Ruling(Finding(oracle="refusal", message=message, got="touched", bound="untouched", where=argument))
    return Ruling()


_CATCHES = "silent wrong answers and crashes where the kernel claims no support"

ORACLES = tuple(
    Oracle(
        name="refusal",
        group=group,
        catches=_CATCHES,
        judge=judge,
        applies=lambda declaration: "declares no support" if declaration.undeclared else None,
    )
    for group in ("refusal", "gradient_refusal")
)
