"""Shared inputs: launches at the same time that read one copy of the inputs give the bits of a
launch that ran alone.

On CUDA, one case in eight whose buffers are at most 32 MiB makes four launches at once, as
`concurrent` does. Each has outputs and workspaces of its own; all read the same inputs. If a
launch changes an input and puts it back, another one reads the change. There is no slack. Kernels
that declare that their runs differ are not judged. On a CPU, `read_only` asks the same.

Premises: none. All launches compute the same function.
"""

from __future__ import annotations

from functools import partial

from verify.cell.arena import side_name
from verify.cell.concurrent import LAUNCHES
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.repeat import backward_applies, forward_applies, on_cuda

_EIGHTH = 2  # of the cases; another one than `concurrent` judges
_LARGEST = 32 << 20  # bytes of one run's buffers


def judge(trial: Trial) -> Ruling:
    """Compare each launch with the one that ran alone."""
    run = trial.sharing
    if run.reply.crowded:  # other processes can leave too little
        return Ruling()
    ruling = fault(trial, run)
    if ruling is not None:
        return ruling
    pairs = [
        (name, alone, run.outputs[side_name(launch, name)])
        for launch in range(LAUNCHES)
        for name, alone in trial.first.outputs.items()
    ]
    return check_same_bits("shared_inputs", "in launches at once that share inputs", pairs)


ORACLES = tuple(
    Oracle(
        name="shared_inputs",
        group=group,
        catches="inputs that a kernel changes and puts back",
        judge=judge,
        excludes=excludes,
        needs=frozenset(),
        concerns=partial(on_cuda, eighth=_EIGHTH, largest=_LARGEST),
        rank=46,
    )
    for group, excludes in (("accuracy", forward_applies), ("gradients", backward_applies))
)
