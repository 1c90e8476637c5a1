"""Separate: a run's buffers as allocations of their own, each ending at its last element.

In the judge's arena an overrun lands in a redzone, which is memory like any other to a tool that
watches allocations.  Here every buffer is copied out of the arena into one allocation, from the
start of its own to just behind its last element (what a strided tensor's last row leaves unused is
no part of it), and copied back after the run.  On CUDA that holds only if torch does not cache
allocations (PYTORCH_NO_CUDA_MEMORY_CACHING=1): its cache hands out pieces of larger blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify.cell.arena import Slot


class Separate:
    """Stands for the arena's bytes where buffers are taken from it: `Slot.view` slices it and looks
    at its device."""

    def __init__(self, slots: Sequence[Slot], host: Tensor, device: str) -> None:
        self.device = torch.device(device)
        self._host = host
        self._parts = [(slot, slot.begin, _end(slot, host)) for slot in slots]
        self._memory = [
            torch.empty(end - begin, dtype=torch.uint8, device=self.device).copy_(host[begin:end])
            for _, begin, end in self._parts
        ]

    def __getitem__(self, where: slice) -> Tensor:
        """The bytes of one buffer; raises IndexError if they are not inside one."""
        for (_, begin, end), memory in zip(self._parts, self._memory, strict=True):
            if begin <= where.start <= where.stop <= end:
                return memory[where.start - begin : where.stop - begin]
        raise IndexError(f"bytes {where.start} to {where.stop} are in no buffer")

    def restore(self) -> None:
        """Copy every buffer back into the arena."""
        for (_, begin, end), memory in zip(self._parts, self._memory, strict=True):
            self._host[begin:end].copy_(memory)


def _end(slot: Slot, host: Tensor) -> int:
    """Just behind the last element; the start of an empty buffer."""
    view = slot.view(host)
    extent = (
        1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if view.numel()
        else 0
    )
    return slot.start + extent * view.element_size()
