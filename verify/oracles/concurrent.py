"""Concurrent: a launch gives the same bits alone and at the same time as other launches, each with
its own stream and buffers.

On CUDA, one case in eight whose buffers are at most 32 MiB makes four launches at once. They wait
until all are queued (`concurrent_held` says whether they did). Every second launch gets a negated
Q, in a backward a negated dO: with equal inputs, all would write equal values to what they share.
Each launch must have the bits of a launch that ran alone. The judge places the buffers of all
launches in its arena and compares the results; the cell, in which the kernel's code runs, compares
nothing. If other processes leave too little memory, there is no finding.

The oracle catches scratch buffers, counters and semaphores that launches share, and work on a
stream that is not torch's current stream. Launches one after another show none of these. Kernels
that declare that their runs differ are not judged. On an H100 all four launches were queued in time
in 82 % of 1,342 cases (in none with flex's compiled kernel: it copies from the host). No kernel of
the collection is convicted; the planted kernel that shares its scratch is convicted at the first
case.

Premises: none. All launches compute the same function.
"""

from __future__ import annotations

from functools import partial

from verify.cell.arena import different, side_name
from verify.cell.concurrent import LAUNCHES
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.repeat import backward_applies, forward_applies, on_cuda

_EIGHTH = 0  # of the cases
# bytes of one run's buffers; one copy per launch exists at the same time
_LARGEST = 32 << 20


def judge(trial: Trial) -> Ruling:
    """Compare each launch with one that ran alone.  Half of the launches have negated inputs, so
    that a buffer which launches share shows.  "concurrent_held" is 1 if no launch began before the
    last was queued."""
    run = trial.concurrent
    # other processes can leave too little memory for so many launches
    if run.reply.crowded:
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


ORACLES = tuple(
    Oracle(
        name="concurrent",
        group=group,
        catches=(
            "scratch buffers, counters and semaphores that launches share, work on a wrong stream"
        ),
        judge=judge,
        excludes=excludes,
        needs=frozenset(),
        concerns=partial(on_cuda, eighth=_EIGHTH, largest=_LARGEST),
        rank=45,
    )
    for group, excludes in (("accuracy", forward_applies), ("gradients", backward_applies))
)
