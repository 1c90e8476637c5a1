"""Execution and memory: what every run of every group must hold, before any oracle looks at its numbers."""

from __future__ import annotations

import math

from verify.evidence import Finding
from verify.memory import unwritten
from verify.trial import Run, Ruling, Trial, first_place


def execution(trial: Trial, run: Run) -> Ruling:
    """Catches refusals inside the support, exceptions, crashes, hangs, exhausted memory and breaches of the interface."""
    reply = run.reply
    if reply.ok:
        return Ruling()
    if reply.status == "unsupported":
        message = f"refuses a problem inside its declared support: {reply.argument}: {reply.message}"
        return Ruling(Finding(oracle="execution", message=message, got="Unsupported", bound="a result", where=reply.argument))
    words = {"breach": "breaks the interface", "raised": "raises", "hang": "hangs", "crash": "crashes"}
    trace = str(reply.data.get("traceback", ""))
    message = f"{words.get(reply.status, reply.status)}: {reply.message}" + (f"\n{trace}" if trace else "")
    return Ruling(Finding(oracle="execution", message=message, got=reply.status, bound="a result"))


def memory(trial: Trial, run: Run) -> Ruling:
    """Catches writes outside the outputs, changed inputs, and outputs (even padding rows) that were never written."""
    if run.damage is not None:
        if run.damage.slot == "redzone":
            message = f"writes outside its outputs: {run.damage.count} bytes changed, the first {run.damage.where}"
        else:
            message = f"changes its input {run.damage.slot}: {run.damage.count} bytes, the first {run.damage.where}"
        found = Finding(oracle="memory", message=message, got="changed", bound="unchanged", where=run.damage.where)
        return Ruling(Finding(**{**vars(found), "count": run.damage.count}))
    for name, tensor in (("out", run.out), ("lse", run.lse)):
        if tensor is None or not tensor.numel():
            continue
        left = unwritten(tensor, run.poison)
        count = int(left.sum())
        if count:
            message = f"leaves {count} of {math.prod(tensor.shape)} elements of {name} unwritten"
            where = first_place(name, left)
            return Ruling(
                Finding(
                    oracle="memory",
                    message=message,
                    got="the poison",
                    bound="a written value",
                    where=where,
                    count=count,
                    total=tensor.numel(),
                )
            )
    return Ruling()
