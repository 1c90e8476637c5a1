"""Memory that is used again: what is asked for anew costs a page fault per page, more than most
sums in it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Room:
    """Tensors of one shape, fp64, with anything in them."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._used = 0
        self._like = torch.empty(0)
        self._shape = self._like.shape

    def clear(self, like: Tensor, *shape: int) -> None:
        """From now on tensors like this one, or of that shape; those handed out before are taken
        back."""
        self._like, self._shape, self._used = like, torch.Size(shape) if shape else like.shape, 0

    def take(self) -> Tensor:
        """The next one."""
        size = self._shape.numel()
        if self._used == len(self._memory):
            self._memory.append(self._like.new_empty(size))
        if self._memory[self._used].numel() < size:
            self._memory[self._used] = self._like.new_empty(size)
        self._used += 1
        return self._memory[self._used - 1][:size].view(self._shape)


_KEPT = threading.local()


def room_on(device: torch.device, use: str = "pairs") -> Room:
    """The room of a device.  A CPU's is kept from call to call, one per thread and use: a caller
    may not hold what it gave beyond a call."""
    if device.type != "cpu":
        return Room()
    if not hasattr(_KEPT, use):
        setattr(_KEPT, use, Room())
    room = getattr(_KEPT, use)
    assert isinstance(room, Room)
    return room
