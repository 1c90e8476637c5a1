"""Isolated buffers: every buffer of a run in an allocation that ends at its last element.

In the judge's arena an overrun writes into a redzone.  A tool that watches allocations cannot see
that: a redzone is part of the arena's allocation.  Here every buffer is copied from the arena into
one allocation, and copied back after the run.  The allocation ends directly after the last element;
the unused end of a strided tensor's last row is not part of it.  On CUDA this works only if torch
does not cache allocations (PYTORCH_NO_CUDA_MEMORY_CACHING=1), since its cache returns parts of
larger blocks.

A workspace is either allocated and not written, so that a tool that watches for reads of memory
that was never written sees a kernel that reads its workspace first; or it holds the arena's poison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from verify.cell.arena import Slot


class IsolatedBuffers:
    """Replaces the arena's uint8 tensor in a launch: `Slot.view` slices it and reads its device."""

    def __init__(
        self, slots: Sequence[Slot], host: Tensor, device: str, *, poisoned: bool = False
    ) -> None:
        """poisoned: whether workspaces hold the arena's poison."""
        self.device = torch.device(device)
        self._host = host
        self._parts = [(slot, slot.begin, _end(slot, host)) for slot in slots]
        self._memory = [
            torch.empty(end - begin, dtype=torch.uint8, device=self.device)
            for _, begin, end in self._parts
        ]
        for (begin, end), memory in self._copied():
            memory.copy_(host[begin:end])
        if poisoned:
            for (slot, begin, end), memory in zip(self._parts, self._memory, strict=True):
                if slot.role == "workspace":
                    memory.copy_(host[begin:end])

    def __getitem__(self, where: slice) -> Tensor:
        """A slice of one buffer, as uint8; raises IndexError if it is not inside one buffer."""
        for (_, begin, end), memory in zip(self._parts, self._memory, strict=True):
            if begin <= where.start <= where.stop <= end:
                return memory[where.start - begin : where.stop - begin]
        raise IndexError(f"bytes {where.start} to {where.stop} are in no buffer")

    def restore(self) -> None:
        """Copy inputs and outputs back into the arena."""
        for (begin, end), memory in self._copied():
            self._host[begin:end].copy_(memory)

    def _copied(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The arena's bytes of every input and output, and its memory."""
        for (slot, begin, end), memory in zip(self._parts, self._memory, strict=True):
            if slot.role != "workspace":
                yield (begin, end), memory


def _end(slot: Slot, host: Tensor) -> int:
    """The offset directly after the slot's last element; the start of an empty buffer."""
    view = slot.view(host)
    extent = (
        1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if view.numel()
        else 0
    )
    return slot.start + extent * view.element_size()
