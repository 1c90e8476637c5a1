"""Runs of one plan that lie in the arena one behind the other, as those of one message do, or one
alone: each is laid, read and searched for damage by the operations of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.cell.arena import (
    CANARY,
    Arena,
    Damage,
    Plan,
    Slot,
    bits,
    damage_in,
    pattern,
    torch_dtype,
)


@dataclass
class Runs:
    """So many runs; the buffers of run i begin at byte `begin + i * step`, and take the plan's
    size.

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

    @staticmethod
    def alone(arena: Arena, where: Plan) -> Runs:
        """One run, at the arena's begin."""
        return Runs(arena, where, 0, where.size, 1)

    def lay(self, inputs: Sequence[Mapping[str, Tensor]], poisons: Sequence[str]) -> None:
        """Fill each run's part of the arena: canaries everywhere, then inputs, then poison in
        outputs and workspaces; keep a copy of all bytes as the pristine image.

        inputs: of each run stored values by the name of the input; an expanded dimension has size
        1.  poisons: of each run a word of `POISONS`.  Several of a message reserve the arena
        before the first of them is laid; if it has too little room, all that it holds is lost.
        """
        self.arena.reserve(self.begin + self.count * self.step)
        now = self._bytes
        images: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        for row, poison in zip(now.reshape(self.count, self.step), poisons, strict=True):
            image = row[: self.where.size]
            if poison in images:
                image[:] = images[poison]
            else:
                images[poison] = image
                self._fill(image, poison)
        whole = torch.from_numpy(now)
        for name, tensor in self.where.inputs.items():
            slots = tensor.slots(name)
            views = {of: self._rows(whole, self.where[slot]).unbind() for of, slot in slots.items()}
            for run, given in enumerate(inputs):
                tensor.storage.write(given[name], {of: rows[run] for of, rows in views.items()})
        self._pristine = now.copy()

    def read(self) -> tuple[list[dict[str, Tensor]], list[bool]]:
        """The outputs of each run, contiguous copies, and whether every element of them was
        written: holds no more what it held before."""
        outputs: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        left: set[int] = set()
        now, pristine = (torch.from_numpy(each) for each in (self._bytes, self._pristine))
        for slot in self.where.of("output"):
            rows = self._rows(now, slot).clone(memory_format=torch.contiguous_format)
            for own, row in zip(outputs, rows.unbind(), strict=True):
                own[slot.name] = row
            if rows.numel():
                before = self._rows(pristine, slot).contiguous()
                # numpy does this faster than torch
                same = bits(rows).numpy() == bits(before).numpy()
                if same.any():
                    left.update(np.flatnonzero(same.reshape(self.count, -1).any(1)).tolist())
        return outputs, [run not in left for run in range(self.count)]

    def damages(self) -> list[Damage | None]:
        """The bytes that a run must not change but did: of an input, a gap or a redzone; or None;
        of each run.  It overwrites the outputs: read them first."""
        now, pristine = self._bytes, self._pristine
        whole, laid = torch.from_numpy(now), torch.from_numpy(pristine)
        for slot in self.where.slots:
            if slot.role != "input":
                self._rows(whole, slot).copy_(self._rows(laid, slot))
        if np.array_equal(now.view(np.uint64), pristine.view(np.uint64)):
            return [None] * self.count
        size, both = self.where.size, (x.reshape(self.count, self.step) for x in (now, pristine))
        return [
            damage_in(self.where, *(x[:size] for x in pair)) for pair in zip(*both, strict=True)
        ]

    @property
    def _bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.arena.bytes[self.begin : self.begin + self.count * self.step]

    def _fill(self, image: np.ndarray[Any, np.dtype[np.uint8]], poison: str) -> None:
        """Fill the bytes of a run, but for its inputs."""
        image.view(np.uint16)[:] = CANARY
        whole = torch.from_numpy(image)
        for slot in self.where.slots:
            if slot.role != "input" and 0 not in slot.shape:
                view = slot.view(whole)
                view.copy_(pattern(view.dtype, poison).expand(view.shape))

    def _rows(self, whole: Tensor, slot: Slot) -> Tensor:
        """A buffer of all runs, (count, *shape): views of all their bytes."""
        dtype = torch_dtype(slot.dtype)
        typed, size = whole.view(dtype), dtype.itemsize
        if 0 in slot.shape:
            return typed[:0].view(self.count, *slot.shape)
        return typed.as_strided(
            (self.count, *slot.shape), (self.step // size, *slot.strides), slot.start // size
        )
