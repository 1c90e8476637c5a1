"""Graph: a launch that was captured in a CUDA graph and is replayed gives the bits of an ordinary
launch, with the inputs that are there at the replay.

On CUDA, one case in eight whose buffers are at most 256 MiB is captured while Q (in a backward: dO)
is negated, and replayed with the case's own inputs over poisoned outputs. A kernel that keeps what
it computed from inputs, or works on another stream than torch's current one, gives other bits or
leaves poison. There is no slack. A kernel that cannot be captured, for instance because it copies
from the host, is not convicted (`graph_captured` says which it was). Kernels that declare that
their runs differ are not judged.

Premises: none. Both launches compute the same function.
"""

from __future__ import annotations

from functools import partial

from verify.cell.ways import GONE, GRAPH
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.repeat import backward_applies, forward_applies, on_cuda

_EIGHTH = 4  # of the cases; another one than `concurrent` judges
_LARGEST = 256 << 20  # bytes of a run's buffers, of which a capture keeps two copies


def judge(trial: Trial) -> Ruling:
    """Compare a replay with an ordinary launch."""
    run = trial.going(GRAPH)
    if run.reply.ok and run.reply.data.get(GONE) is not True:
        return Ruling(measures={"graph_captured": 0.0})
    ruling = fault(trial, run)
    if ruling is None:
        pairs = [(name, own, run.outputs[name]) for name, own in trial.first.outputs.items()]
        ruling = check_same_bits("graph", "replayed from a CUDA graph with other inputs", pairs)
    return Ruling(ruling.finding, {"graph_captured": 1.0})


ORACLES = tuple(
    Oracle(
        name="graph",
        group=group,
        catches="values of inputs that a launch keeps for the next, work on a wrong stream",
        judge=judge,
        excludes=excludes,
        needs=frozenset(),
        concerns=partial(on_cuda, eighth=_EIGHTH, largest=_LARGEST),
        rank=47,
    )
    for group, excludes in (("accuracy", forward_applies), ("gradients", backward_applies))
)
