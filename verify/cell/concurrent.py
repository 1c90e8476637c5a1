"""Together: one run several times at once, each launch on a stream and in buffers of its own.

The judge lays the inputs of all launches side by side in its arena, those of every other launch
negated.  What launches share by mistake shows then: with the same inputs all would write the same
into it.  It compares what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

LAUNCHES = 4
# of a GPU's clock in a second, at most: on a slower one launches are held back for longer
_CYCLES = 2e9
_SHORTEST, _LONGEST = 5e-4, 1e-2  # seconds for which launches are held back


class Queues(Protocol):
    """Where launches go that may run at once."""

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        """Hold them all back for so long, then let them run; whether none had begun before the last
        was queued.  What is queued later on the current stream waits for all of them."""


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


def run_together(
    arenas: Sequence[Tensor], launch: Callable[[Tensor], None], queues: Queues
) -> bool:
    """Launch over all arenas at once, after a lone launch over a copy of one; whether they were
    held back (see `Queues`).

    Nothing is compared here: what launches wrote is in the judge's arena, and the judge knows what
    it must be.
    """
    spare = arenas[1].clone()
    begun = time.perf_counter()
    launch(spare)  # compiles what is left to compile, and tells how long queueing takes
    seconds = 2 * LAUNCHES * (time.perf_counter() - begun)
    return queues.run(
        [partial(launch, each) for each in arenas], min(max(seconds, _SHORTEST), _LONGEST)
    )
