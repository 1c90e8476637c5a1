"""Together: one run several times at once, each launch on a stream and in buffers of its own.

Every other launch gets negated inputs.  What launches share by mistake shows then: with the same inputs all would write the
same into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from verify.memory import Slot, bits, slots_from

LAUNCHES = 4
_CYCLES = 2e9  # of a GPU's clock in a second, at most: on a slower one launches are held back for longer
_SHORTEST, _LONGEST = 5e-4, 1e-2  # seconds for which launches are held back


class Queues(Protocol):
    """Where launches go that may run at once."""

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        """Hold them all back for so long, then let them run; whether none had begun before the last was queued.  What is
        queued later on the current stream waits for all of them."""


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


def run_together(message: dict[str, Any], arena: Tensor, launch: Callable[[Tensor], None], queues: Queues) -> dict[str, Any]:
    """Launch over `arena` and copies of it at once, once more alone over each other input, and compare.

    "differing": by output, in how many elements the launch that strays most does so, bit for bit: from the one over `arena`
    if it has the same inputs, else from the lone one.  "held": see `Queues`.
    """
    slots = slots_from(message["slots"])
    other = negated(arena, next(slot for slot in slots if slot.name == ("dout" if message["entry"] == "backward" else "q")))
    alone, arenas = other.clone(), [arena, other, arena.clone(), other.clone()]
    begun = time.perf_counter()
    launch(alone)  # compiles what is left to compile
    seconds = 2 * LAUNCHES * (time.perf_counter() - begun)
    held = queues.run([partial(launch, each) for each in arenas], min(max(seconds, _SHORTEST), _LONGEST))
    pairs = ((arenas[2], arena), (arenas[1], alone), (arenas[3], alone))
    outputs = [slot for slot in slots if slot.role == "output"]
    return {"differing": {slot.name: max(_differing(slot, *pair) for pair in pairs) for slot in outputs}, "held": held}


def negated(arena: Tensor, slot: Slot) -> Tensor:
    """A copy of the arena with every sign in that buffer's allocation flipped: an expanded one holds each element once."""
    copy = arena.clone()
    words = bits(copy[slot.begin : slot.end].view(getattr(torch, slot.dtype)))
    words.bitwise_xor_(torch.iinfo(words.dtype).min or 1 << 7)  # the topmost bit; bytes have no least integer that is it
    return copy


def _differing(slot: Slot, one: Tensor, other: Tensor) -> int:
    """In how many elements one buffer of two arenas differs."""
    return int((bits(slot.view(one).contiguous()) != bits(slot.view(other).contiguous())).sum())
