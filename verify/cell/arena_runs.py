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
    _poisons: tuple[str, ...] = ()
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
        self._poisons = tuple(poisons)
        self._bytes.view(np.uint16)[:] = CANARY
        self._poison()
        now = self._bytes
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
        left: set[int] = set()
        for slot in self.where.of("output"):
            rows = self._rows(self._bytes, slot).clone(memory_format=torch.contiguous_format)
            for own, row in zip(outputs, rows.unbind(), strict=True):
                own[slot.name] = row
            if rows.numel():
                same = bits(rows) == bits(self._patterns(slot))
                if bool(same.any()):
                    left.update(same.view(self.count, -1).any(1).nonzero()[:, 0].tolist())
        return outputs, [run not in left for run in range(self.count)]

    def damages(self) -> list[Damage | None]:
        """The bytes that a run must not change but did: of an input, a gap or a redzone; or None;
        of each run.  It overwrites the outputs: read them first."""
        self._poison()
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

    def _poison(self) -> None:
        """Fill the outputs and workspaces of all runs."""
        for slot in self.where.slots:
            if slot.role != "input":
                rows = self._rows(self._bytes, slot)
                if rows.numel():
                    rows.copy_(self._patterns(slot).expand(rows.shape))

    def _patterns(self, slot: Slot) -> Tensor:
        """The poison of each run, or of all runs if it is one: contiguous, of the dimensions of
        `_rows`."""
        dtype, ones = torch_dtype(slot.dtype), (1,) * len(slot.shape)
        poisons = set(self._poisons)
        if len(poisons) > 1:
            each = [pattern(dtype, poison).view(torch.uint8) for poison in self._poisons]
            return torch.cat(each).view(dtype).view(self.count, *ones)
        return pattern(dtype, *poisons).view(1, *ones)

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
