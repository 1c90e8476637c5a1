"""Concurrent launches of one run, each on its own stream and in its own buffers.

The judge lays the inputs of all launches side by side in its arena and negates those of every
second launch.  If launches share memory by mistake, their results then differ; with equal inputs
all would write equal values into the shared memory.  The judge compares the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

LAUNCHES = 4
# The highest clock rate of a GPU, in Hz: on a slower GPU launches are held back for longer.
_CYCLES = 2e9
_SHORTEST, _LONGEST = 5e-4, 1e-2  # seconds for which launches are held back


class Queues(Protocol):
    """Queues on which launches can run at the same time."""

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        """Hold all launches back for that time, then start them.

        Returns whether none had begun before the last was queued.  Later work on the current
        stream waits for all of them.
        """


class Streams:
    """Streams of one process, made once: torch's allocator and cuBLAS keep memory for each."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(LAUNCHES)]  # type: ignore[no-untyped-call]

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        """See `Queues`."""
        main = torch.cuda.current_stream()
        torch.cuda._sleep(int(seconds * _CYCLES))  # type: ignore[no-untyped-call]
        gate = main.record_event()
        try:
            for stream, launch in zip(self._streams, launches, strict=True):
                stream.wait_event(gate)
                with torch.cuda.stream(stream):
                    launch()
            return not gate.query()
        finally:
            for stream in self._streams:
                main.wait_stream(stream)


def run_concurrently(
    arenas: Sequence[Tensor], launch: Callable[[Tensor], None], queues: Queues
) -> bool:
    """Launch over all arenas at once, after one launch over a copy of an arena.

    arenas: `LAUNCHES` uint8 tensors.  Returns whether the launches were held back (see `Queues`).
    Nothing is compared here: the results are in the judge's arena, and the judge compares them.
    """
    spare = arenas[1].clone()
    begun = time.perf_counter()
    launch(spare)  # compiles the kernel if necessary, and shows how long queueing takes
    seconds = 2 * LAUNCHES * (time.perf_counter() - begun)
    return queues.run(
        [partial(launch, each) for each in arenas], min(max(seconds, _SHORTEST), _LONGEST)
    )
