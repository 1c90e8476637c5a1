"""Execution and memory: the checks of every run of every group, before an oracle reads its
numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verify.cell.arena import bits, unwritten
from verify.cell.process import Reply
from verify.evidence import Finding
from verify.judging.findings import Ruling, convict, first_place
from verify.judging.launch import Launch
from verify.judging.trial import Trial

# bytes; less that a process takes in one run, and keeps, is not recorded
_GROWTH = 64 << 20


def fault(trial: Trial, run: Launch) -> Ruling | None:
    """The ruling against a further run that fails a check; None if its numbers can be used."""
    rulings = (check(trial, run) for check in (execution, memory))
    return next((ruling for ruling in rulings if ruling.finding is not None), None)


def held(trial: Trial) -> Iterator[tuple[str, Launch, Ruling]]:
    """The checks of a trial's runs: (name, run, ruling), up to the first ruling that makes the rest
    meaningless.

    For a backward, the forward that saves O and LSE comes first, and only a conviction of it is
    given.  A run is launched when its first check is read.
    """
    checks = (("execution", execution), ("memory", memory))
    if trial.entry == "backward":
        for name, check in checks:
            ruling = check(trial, trial.saved)
            if ruling.finding is not None:
                message = f"the forward that saves O and LSE {ruling.finding.message}"
                yield name, trial.saved, Ruling(replace(ruling.finding, message=message))
                return
    for name, check in checks:
        ruling = check(trial, trial.first)
        yield name, trial.first, ruling
        if name == "execution" and ruling.finding is not None:
            return


def execution(trial: Trial, run: Launch) -> Ruling:
    """Catches refusals inside the support, exceptions, crashes, hangs, exhausted memory and
    breaches of the interface."""
    reply = run.reply
    if reply.ok:
        return Ruling(measures=_growth(reply))
    if reply.status == "unsupported":
        message = (
            f"refuses a problem inside its declared support: {reply.argument}: {reply.message}"
        )
        return Ruling(
            Finding(
                oracle="execution",
                message=message,
                got="Unsupported",
                bound="a result",
                where=reply.argument,
            )
        )
    words = {
        "breach": "breaks the interface",
        "raised": "raises",
        "hang": "hangs",
        "crash": "crashes",
    }
    trace = str(reply.data.get("traceback", ""))
    message = f"{words.get(reply.status, reply.status)}: {reply.message}" + (
        f"\n{trace}" if trace else ""
    )
    return Ruling(Finding(oracle="execution", message=message, got=reply.status, bound="a result"))


def _growth(reply: Reply) -> dict[str, float]:
    """The memory that a run took and kept, in bytes, if it is large enough to record."""
    least = {
        "memory_growth": (reply.grown, _GROWTH),
        "device_memory_growth": (reply.kept, 1),  # torch counts each byte of this process alone
        "device_memory_taken": (reply.taken, _GROWTH),
    }
    return {name: float(grown) for name, (grown, most) in least.items() if grown >= most}


def memory(trial: Trial, run: Launch) -> Ruling:
    """Catches writes outside the outputs, changed inputs, and outputs (even padding rows) that were
    never written."""
    damage = run.damage
    if damage is not None:
        what = (
            "writes outside its outputs"
            if damage.slot == "redzone"
            else f"changes its input {damage.slot}"
        )
        message = f"{what}: {damage.count} bytes changed, the first {damage.where}"
        return Ruling(
            Finding(
                oracle="memory",
                message=message,
                got="changed",
                bound="unchanged",
                where=damage.where,
                count=damage.count,
            )
        )
    for name, tensor in run.outputs.items():
        if run.written or not tensor.numel():
            continue
        left = unwritten(tensor, run.poison)
        if run.poison != "nan" and bool(left.any()):
            # A finite poison can be the right value (65504 is fp16's largest): the first run then
            # wrote it over NaN. Kernels not declared deterministic run only over NaN poison.
            left &= bits(tensor) != bits(trial.first.outputs[name])
        if bool(left.any()):
            message = (
                f"leaves {int(left.sum())} of {left.numel()} elements of {name} unwritten, the"
                f" first {first_place(name, left)}"
            )
            return convict(
                "memory", message, name=name, bad=left, got="the poison", bound="a written value"
            )
    return Ruling()
