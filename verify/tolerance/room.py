"""Memory that is used again: what is asked for anew costs a page fault per page, more than most sums in it."""

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

    def clear(self, like: Tensor) -> None:
        """From now on tensors like this one; those handed out before are taken back."""
        self._like, self._used = like, 0

    def take(self) -> Tensor:
        """The next one."""
        size = self._like.numel()
        if self._used == len(self._memory):
            self._memory.append(self._like.new_empty(size))
        if self._memory[self._used].numel() < size:
            self._memory[self._used] = self._like.new_empty(size)
        self._used += 1
        return self._memory[self._used - 1][:size].view(self._like.shape)


_KEPT = threading.local()


def room_on(device: torch.device) -> Room:
    """A CPU's is kept from call to call, one per thread, so that nobody may hold what it gave beyond a call."""
    if device.type != "cpu":
        return Room()
    if not hasattr(_KEPT, "room"):
        _KEPT.room = Room()
    room = _KEPT.room
    assert isinstance(room, Room)
    return room
