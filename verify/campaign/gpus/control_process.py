"""A process that judges the control problem on the first visible GPU: `python -m` this module, with
a seed.  It prints an answer as JSON.

A device that does not answer can take this process with it, and no other.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from verify.machine import leash

_THREADS = 2  # beside as many workers as there are cores


class Answer(msgspec.Struct, frozen=True):
    """made: whether it was computed; other processes can have filled the GPU's memory, or have the
    GPU for themselves.  wrong: what is wrong, or ""."""

    made: bool
    wrong: str = ""
    seconds: float = 0.0


def main() -> int:
    """Judge the control problem; returns the exit code."""
    parent = os.environ.pop(leash.PARENT, None)
    if parent is not None:
        leash.die_with(int(parent))
    print(msgspec.json.encode(answer(int(sys.argv[1]))).decode(), flush=True)
    return 0


def answer(seed: int) -> Answer:
    """What the control problem of a seed finds."""
    import torch

    from verify.campaign.leases import control
    from verify.cell.device_memory import exhausted, unavailable

    torch.set_num_threads(_THREADS)
    # A GPU that CUDA no longer lists must not be spoken for by the CPU.
    gpu = torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES")
    begun = time.monotonic()
    try:
        wrong = control.check(seed, "cuda" if gpu else None)
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        if exhausted(error) or unavailable(error):  # what other processes do to a GPU
            return Answer(made=False)
        wrong = f"the control problem was not computed: {said}"
    return Answer(made=True, wrong=wrong, seconds=round(time.monotonic() - begun, 3))


if __name__ == "__main__":
    from verify.machine.starter_process import leave

    leave(main())
