"""Runs of one plan that lie in the arena one behind the other, as those of one message do: each is
laid, read and searched for damage by the operations of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.cell.arena import CANARY, Arena, Damage, Plan, Slot, bits, damage_in, fill, torch_dtype


@dataclass
class Runs:
    """So many runs; the buffers of run i begin at byte `begin + i * step`, and take the plan's
    size.  The arena has room for `count * step` bytes from `begin` on.

    step: a multiple of 8, as `begin` is.
    """

    arena: Arena
    where: Plan
    begin: int
    step: int
    count: int
    _pristine: np.ndarray[Any, np.dtype[np.uint8]] = field(
        default_factory=lambda: np.empty(0, np.uint8)
    )

    def lay(self, inputs: Sequence[Mapping[str, Tensor]], poisons: Sequence[str]) -> None:
        """As `Arena.lay`, of each run.  A copy of all bytes is kept as the pristine image."""
        now = self._bytes.reshape(self.count, self.step)
        images = {poison: self._image(poison) for poison in dict.fromkeys(poisons)}
        for row, poison in zip(now, poisons, strict=True):
            row[: self.where.size] = images[poison]
        for name, tensor in self.where.inputs.items():
            slots = tensor.slots(name)
            views = {of: self._views(now, self.where[slot]) for of, slot in slots.items()}
            for run, given in enumerate(inputs):
                tensor.storage.write(given[name], {of: rows[run] for of, rows in views.items()})
        self._pristine = self._bytes.copy()

    def read(self) -> tuple[list[dict[str, Tensor]], list[bool]]:
        """The outputs of each run, contiguous copies, and whether every element of them was
        written: holds no more what it held before."""
        outputs: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        written = np.ones(self.count, bool)
        for slot in self.where.of("output"):
            rows = self._rows(self._bytes, slot).clone(memory_format=torch.contiguous_format)
            for own, row in zip(outputs, rows.unbind(), strict=True):
                own[slot.name] = row
            if rows.numel():
                before = self._rows(self._pristine, slot).contiguous()
                same = (bits(rows) == bits(before)).flatten(1).any(1)
                written &= ~same.numpy()
        return outputs, written.tolist()

    def damages(self) -> list[Damage | None]:
        """As `Arena.damage`, of each run.  It overwrites the outputs: read them first."""
        for slot in self.where.slots:
            if slot.role != "input":
                self._rows(self._bytes, slot).copy_(self._rows(self._pristine, slot))
        now, pristine = self._bytes, self._pristine
        if np.array_equal(now.view(np.uint64), pristine.view(np.uint64)):
            return [None] * self.count
        size, both = self.where.size, (x.reshape(self.count, self.step) for x in (now, pristine))
        return [
            damage_in(self.where, *(x[:size] for x in pair)) for pair in zip(*both, strict=True)
        ]

    @property
    def _bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.arena.bytes[self.begin : self.begin + self.count * self.step]

    def _image(self, poison: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a run without its inputs."""
        image = np.full(self.where.size // 2, CANARY, np.uint16).view(np.uint8)
        for slot in self.where.slots:
            if slot.role != "input":
                fill(slot.view(torch.from_numpy(image)), poison)
        return image

    def _views(self, arena: np.ndarray[Any, Any], slot: Slot) -> tuple[Tensor, ...]:
        return self._rows(arena, slot).unbind()

    def _rows(self, arena: np.ndarray[Any, Any], slot: Slot) -> Tensor:
        """A buffer of all runs, (count, *shape): views of these bytes."""
        dtype = torch_dtype(slot.dtype)
        typed = torch.from_numpy(arena.reshape(-1)[slot.start :]).view(dtype)
        if 0 in slot.shape:
            return typed[:0].view(self.count, *slot.shape)
        return typed.as_strided(
            (self.count, *slot.shape), (self.step // dtype.itemsize, *slot.strides)
        )
