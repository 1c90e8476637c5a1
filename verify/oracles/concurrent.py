"""Concurrent: a launch gives the same bits beside others, each on a stream and in buffers of its own, as alone."""

from __future__ import annotations

from verify.cell.together import LAUNCHES
from verify.evidence import Finding
from verify.memory import Plan, different
from verify.oracles import Oracle
from verify.oracles.execution import fault
from verify.oracles.repeat import backward_applies, forward_applies
from verify.trial import Ruling, Run, Trial, convict, first, place

_ONE_IN = 8  # cases
_LARGEST = 32 << 20  # bytes of one run's buffers, of which as many copies as launches live at once beside them


def judge(trial: Trial) -> Ruling:
    """Half of the launches have the case's inputs, half others, so that what they share shows; each is compared with a lone
    one.  "concurrent_held" is 1 where none began before the last was queued."""
    run = trial.concurrent
    if run.reply.status == "out of memory":  # so many launches may need more than other processes leave
        return Ruling(measures={"concurrent_held": 0.0})
    ruling = fault(trial, run)
    if ruling is not None:
        return ruling
    compared = _compared(run)
    if compared is None:
        message = "answers in its cell's place: the reply says nothing of the other launches"
        return Ruling(Finding(oracle="concurrent", message=message, got=str(run.reply.data), bound="what differs by output"))
    differing, held = compared
    measures = {"concurrent_held": float(held)}
    for name, count in differing.items():
        if count:
            message = f"{name} of one of {LAUNCHES} launches at once differs in {count} elements from what it is alone"
            found = Finding(
                oracle="concurrent", message=message, got="other bits", bound="the same bits", where=name, count=count
            )
            return Ruling(found, measures)
    for name, alone in trial.first.outputs.items():
        beside = run.outputs[name]
        changed = different(alone, beside)
        if bool(changed.any()):
            at = first(changed)
            got, want = float(beside[at]), float(alone[at])
            message = (
                f"{name} is {want:.9g} alone, and {got:.9g} beside {LAUNCHES - 1} other launches at {place(name, at)}; "
                f"{int(changed.sum())} of {changed.numel()} elements differ"
            )
            return convict("concurrent", message, name=name, bad=changed, got=got, bound=want)
    return Ruling(measures=measures)


def _compared(run: Run) -> tuple[dict[str, int], bool] | None:
    """How many elements of each output differ, and whether the launches were held; None if the reply is not the cell's."""
    try:
        data = run.reply.data
        differing = {name: int(data["differing"][name]) for name in run.outputs}
        return differing, bool(data["held"])
    except (KeyError, TypeError, ValueError):
        return None


def _concerns(trial: Trial) -> bool:
    if trial.cell.environment.device != "cuda" or trial.problem.seed % _ONE_IN:
        return False
    where = trial.plan(trial.entry)
    return isinstance(where, Plan) and where.size <= _LARGEST


ORACLES = tuple(
    Oracle(
        name="concurrent",
        group=group,
        catches="scratch buffers, counters and semaphores that launches share, work that is left on another stream",
        judge=judge,
        applies=applies,
        concerns=_concerns,
        rank=45,
    )
    for group, applies in (("accuracy", forward_applies), ("gradients", backward_applies))
)
