"""Read only: a kernel computes the same in memory whose inputs cannot be written.

On a CPU, one case in eight runs again while the pages of all inputs are read-only. A kernel that
writes an input is ended by a signal there, even if it would put back what it found: other threads
of the caller can read the input at the same time. There is no slack. On a GPU, `shared_inputs` asks
the same. Triton's interpreter copies every tensor back after a launch, so interpreted kernels are
not judged.

Premises: none. The kernel computes the same function.
"""

from __future__ import annotations

from verify.cell.ways import READ_ONLY
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle

_ONE_IN = 8  # cases


def judge(trial: Trial) -> Ruling:
    """Convict a kernel that a write to an input ends, or whose run fails a check."""
    run = trial.going(READ_ONLY)
    if not any(signal in run.reply.message for signal in ("SIGSEGV", "SIGBUS")):
        return fault(trial, run) or Ruling()
    message = f"writes an input: with inputs that cannot be written it is {run.reply.message}"
    return Ruling(
        Finding(oracle="read_only", message=message, got="a write", bound="reads", where="inputs")
    )


def _concerns(trial: Trial) -> bool:
    judged = trial.cell.environment.device == "cpu" and not trial.declaration.interpreted
    return judged and trial.problem.seed % _ONE_IN == 0


ORACLES = tuple(
    Oracle(
        name="read_only",
        group=group,
        catches="inputs that a kernel changes and puts back",
        judge=judge,
        needs=frozenset(),
        concerns=_concerns,
        rank=46,
    )
    for group in ("accuracy", "gradients")
)
