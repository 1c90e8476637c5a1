"""Concurrent: a launch gives the same bits beside others, each on a stream and in buffers of its
own, as alone.

On CUDA, one case in eight whose buffers are at most 32 MiB makes four launches at once, held back
until all are queued (`concurrent_held` says whether they were). Every other launch gets a negated
Q, in a backward a negated dO: with the same inputs all would write the same into what they share.
Each must have the bits of a lone launch. The judge lays the buffers of all launches side by side in
its arena and compares the results; the cell, in which the kernel's code runs, compares nothing. It
is no finding if other processes leave too little memory.

Catches scratch buffers, counters and semaphores that launches share, and work left on another
stream than torch's current one. One launch after another shows none of these. Not asked of kernels
that declare that their runs differ. On an H100 all four launches were queued in time in 82 % of
1,342 cases (in none with flex's compiled kernel: it copies from the host). No kernel of the
collection is convicted; the planted one that shares its scratch is convicted at the first case.

Premises: none. The lone launch and those beside it are asked the same.
"""

from __future__ import annotations

from verify.cell.arena import Plan, different, side_name
from verify.cell.concurrent import LAUNCHES
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.repeat import backward_applies, forward_applies

_ONE_IN = 8  # cases
# bytes of one run's buffers, of which as many copies as launches live at once beside them
_LARGEST = 32 << 20


def judge(trial: Trial) -> Ruling:
    """Half of the launches have the case's inputs, half others, so that what they share shows; each
    is compared with a lone one.  "concurrent_held" is 1 where none began before the last was
    queued."""
    run = trial.concurrent
    # so many launches may need more than other processes leave
    if run.reply.status == "out of memory":
        return Ruling(measures={"concurrent_held": 0.0})
    for each in (trial.negated, run):
        ruling = fault(trial, each)
        if ruling is not None:
            return ruling
    measures = {"concurrent_held": float(run.reply.data.get("held") is True)}
    for launch in range(LAUNCHES):
        for name, alone in (trial.negated if launch % 2 else trial.first).outputs.items():
            beside = run.outputs[side_name(launch, name)]
            changed = different(alone, beside)
            if bool(changed.any()):
                at = first(changed)
                got, want = float(beside[at]), float(alone[at])
                message = (
                    f"{name} is {want:.9g} alone, and {got:.9g} beside {LAUNCHES - 1} other"
                    f" launches at {place(name, at)}; {int(changed.sum())} of {changed.numel()}"
                    " elements differ"
                )
                found = convict("concurrent", message, name=name, bad=changed, got=got, bound=want)
                return Ruling(found.finding, measures)
    return Ruling(measures=measures)


def _concerns(trial: Trial) -> bool:
    if trial.cell.environment.device != "cuda" or trial.problem.seed % _ONE_IN:
        return False
    where = trial.plan(trial.entry)
    return isinstance(where, Plan) and where.size <= _LARGEST


ORACLES = tuple(
    Oracle(
        name="concurrent",
        group=group,
        catches=(
            "scratch buffers, counters and semaphores that launches share, work that is left on"
            " another stream"
        ),
        judge=judge,
        excludes=excludes,
        needs=frozenset(),
        concerns=_concerns,
        rank=45,
    )
    for group, excludes in (("accuracy", forward_applies), ("gradients", backward_applies))
)
