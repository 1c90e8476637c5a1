"""Other device: a launch while another device is current gives the same bits.

Where a process sees two GPUs, one case in eight runs again while torch's current device is not the
one that holds the tensors. A kernel has to launch where its tensors are. There is no slack. With
one GPU the case runs again as always (`other_device` says which it was). Kernels that declare that
their runs differ are not judged.

Premises: none. Both launches compute the same function.
"""

from __future__ import annotations

from functools import partial

from verify.cell.ways import GONE, OTHER_DEVICE
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.oracles.repeat import backward_applies, forward_applies, on_cuda

_EIGHTH = 6  # of the cases; another one than `concurrent` judges


def judge(trial: Trial) -> Ruling:
    """Compare the launch with an ordinary one."""
    run = trial.going(OTHER_DEVICE)
    ruling = fault(trial, run)
    if ruling is None:
        pairs = [(name, own, run.outputs[name]) for name, own in trial.first.outputs.items()]
        ruling = check_same_bits("other_device", "while another device is current", pairs)
    return Ruling(ruling.finding, {"other_device": float(run.reply.data.get(GONE) is True)})


ORACLES = tuple(
    Oracle(
        name="other_device",
        group=group,
        catches="launches on the current device that are not on the tensors' device",
        judge=judge,
        excludes=excludes,
        needs=frozenset(),
        concerns=partial(on_cuda, eighth=_EIGHTH),
        rank=48,
    )
    for group, excludes in (("accuracy", forward_applies), ("gradients", backward_applies))
)
