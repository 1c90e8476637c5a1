"""Guarded memory: every buffer that a kernel sees lies in one arena that the judge owns.

Redzones around every buffer, the gaps inside strided buffers, and all outputs and workspaces hold
quiet-NaN patterns with unusual payloads: a read past an edge gives NaN, and a write there shows.
The check is the same for this machine's memory and for a copy of the arena on a device: after the
run the bytes come back, outputs are read, their poison is restored, and the arena must equal its
pristine image byte for byte.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.problem import Layout, Problem, Storage
from verify.problem.storage import STRIDED, Piece, Shape4

# Bytes on each side of a buffer; if a tile reaches past a short tensor, it stays inside.
REDZONE = 16 * 1024
ALIGNMENT = 512

CANARY = 0x7FF9  # a quiet NaN in fp16 and bf16, doubled in fp32 and fourfold in fp64
# The content of outputs before a run; "huge" is finite in every 16-, 32- and 64-bit format.
POISONS = {"nan": 0x7FFD, "huge": 0x7BFF}
# The same in 8 bits, where only the negative NaN of e4m3 is unusual.
_BYTES = {"nan": 0xFF, "huge": 0x7B}


_GENERATIONS = count(1)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name, also an integer one (for semaphores).  Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: torch has no {name!r}")
    return dtype


@dataclass(frozen=True)
class Slot:
    """One buffer: a strided view of `shape` whose first element lies at byte `start`; [begin, end)
    is its allocation.

    role: "input" (a run must not change it), "output" (a run must write every element) or
    "workspace".
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    begin: int
    end: int

    def view(self, arena: Tensor) -> Tensor:
        """This buffer as a tensor over the arena's bytes (a uint8 tensor)."""
        dtype = torch_dtype(self.dtype)
        size = dtype.itemsize
        extent = (
            0
            if 0 in self.shape
            else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        ) * size
        typed = arena[self.start : self.start + extent].view(dtype)
        return typed.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Buffers:
    """The buffers of one tensor: its dtype, logical shape and storage, and the storage's pieces."""

    dtype: str
    shape: tuple[int, ...]
    storage: Storage
    pieces: Mapping[str, Piece]

    @staticmethod
    def packed(dtype: str, shape: tuple[int, ...]) -> Buffers:
        """The buffer of a contiguous tensor."""
        return Buffers(dtype, shape, Layout(), {"": Piece.packed(shape)})

    @staticmethod
    def stored(dtype: str, shape: Shape4, storage: Storage) -> Buffers:
        """The buffers of a tensor in that storage."""
        return Buffers(dtype, shape, storage, storage.pieces(shape))

    def slots(self, name: str) -> dict[str, str]:
        """Name of a piece -> name of its slot, for a tensor of that name."""
        return {piece: f"{name}.{piece}" if piece else name for piece in self.pieces}


@dataclass(frozen=True)
class Plan:
    """The places of all buffers of one run.  size: in bytes.  inputs: by name."""

    slots: tuple[Slot, ...]
    size: int
    inputs: Mapping[str, Buffers]

    def __getitem__(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)

    def of(self, role: str) -> list[Slot]:
        """The buffers of that role."""
        return [slot for slot in self.slots if slot.role == role]

    def __contains__(self, name: str) -> bool:
        return any(slot.name == name for slot in self.slots)

    def as_data(self) -> list[dict[str, Any]]:
        """The slots as JSON-ready data."""
        return [dict(vars(slot)) for slot in self.slots]

    def stored_as_data(self) -> dict[str, dict[str, Any]]:
        """The inputs that are not strided tensors, as JSON-ready data."""
        return {
            name: {
                "word": tensor.storage.word,
                "name": tensor.storage.name,
                "holds": tensor.storage.holds,
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "slots": tensor.slots(name),
            }
            for name, tensor in self.inputs.items()
            if tensor.storage.word != STRIDED
        }

    def owner(self, byte: int) -> str:
        """A text that says what is at that byte."""
        for slot in self.slots:
            if slot.begin <= byte < slot.end:
                return (
                    f"{byte - slot.start:+d} bytes from the start of {slot.name}, inside its"
                    " allocation"
                )
        before = [slot for slot in self.slots if slot.end <= byte]
        if before:
            return f"{byte - before[-1].end} bytes past the end of {before[-1].name}"
        return f"{self.slots[0].begin - byte} bytes before {self.slots[0].name}"


def slots_from(data: list[dict[str, Any]]) -> tuple[Slot, ...]:
    """Rebuild the slots from `Plan.as_data`'s list (after JSON)."""
    return tuple(
        Slot(**(slot | {"shape": tuple(slot["shape"]), "strides": tuple(slot["strides"])}))
        for slot in data
    )


def plan(
    problem: Problem,
    *,
    lse: bool,
    workspace: Mapping[str, tuple[tuple[int, ...], str]],
    entry: str = "forward",
) -> Plan:
    """Lay out the buffers of one run of an entry point: inputs, outputs and workspaces.

    lse: whether the contract has one.  A forward reads q, k, v (and descales) and writes out and
    lse.  A backward also reads the saved out and lse, and dout, and writes dq, dk and dv.
    """
    p = problem
    own = {n: Buffers.stored(p.dtype, p.shapes[n], p.layouts[n]) for n in "qkv"}
    for name, shape in p.quantisation.buffers(p.shapes).items():
        shared = Piece(shape, (0,) * len(shape)) if p.quantisation.shared else Piece.packed(shape)
        own[name] = Buffers("float32", shape, Layout(), {"": shared})
    made = {"out": Buffers.stored(p.dtype_out, p.shape_out, p.layout_out)}
    if lse:
        made["lse"] = Buffers.packed("float32", p.shape_q[:3])
    if entry == "backward":
        own |= made | {"dout": Buffers.stored(p.dtype_out, p.shape_out, p.layout_dout)}
        like = {n: p.layouts[n].gradient for n in "qkv"}
        made = {f"d{n}": Buffers.stored(p.dtype, p.shapes[n], like[n]) for n in "qkv"}
    scratch = {
        f"workspace.{name}": Buffers.packed(dtype, tuple(map(index, shape)))
        for name, (shape, dtype) in workspace.items()
    }
    slots: list[Slot] = []
    position = REDZONE
    for role, tensors in (("input", own), ("output", made), ("workspace", scratch)):
        for name, tensor in tensors.items():
            names = tensor.slots(name)
            for of, piece in tensor.pieces.items():
                slots.append(_slot(names[of], role, piece.dtype or tensor.dtype, piece, position))
                position = _up(slots[-1].end) + REDZONE
    return Plan(tuple(slots), _up(position), own)


def workspace_limit(problem: Problem) -> int:
    """Bytes that the workspaces of one run may have: 128 MiB, plus 64 times the tensors and 4 times
    the scores, in float32.

    This is enough for 64 splits of an output in float32, or for P, dP and two copies of either.
    The judge fills, copies and compares every byte in each run, so larger workspaces would cost
    minutes per case.
    """
    p = problem
    elements = sum(math.prod(p.shapes[name]) for name in ("q", "k", "v")) + math.prod(p.shape_out)
    scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv
    return (128 << 20) + 64 * 4 * elements + 4 * 4 * scores


def _slot(name: str, role: str, dtype: str, piece: Piece, position: int) -> Slot:
    size = torch_dtype(dtype).itemsize
    return Slot(
        name,
        role,
        dtype,
        piece.shape,
        piece.strides,
        position + piece.offset * size,
        position,
        position + (piece.extent + piece.behind) * size,
    )


def side_name(launch: int, name: str) -> str:
    """The name of a buffer of one of several concurrent launches."""
    return f"launch {launch}: {name}"


def side_by_side(
    where: Plan, given: Sequence[Mapping[str, Tensor]]
) -> tuple[Plan, dict[str, Tensor]]:
    """Repeat one run's plan for each element of `given`; returns the new plan, and the inputs under
    its names."""
    slots: list[Slot] = []
    buffers: dict[str, Buffers] = {}
    inputs: dict[str, Tensor] = {}
    for launch, tensors in enumerate(given):
        ahead = launch * where.size
        for slot in where.slots:
            begin, end = slot.begin + ahead, slot.end + ahead
            name = side_name(launch, slot.name)
            slots.append(replace(slot, name=name, start=slot.start + ahead, begin=begin, end=end))
        buffers |= {side_name(launch, name): tensor for name, tensor in where.inputs.items()}
        inputs |= {side_name(launch, name): tensor for name, tensor in tensors.items()}
    return Plan(tuple(slots), where.size * len(given), buffers), inputs


def _up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Damage:
    """Bytes that a run changed outside its outputs."""

    slot: str  # the input that changed, or "redzone"
    where: str
    count: int


@dataclass(eq=False)
class Holder:
    """A kernel process that maps an arena.  ended: it was killed, with all that it had started."""

    ended: bool = False


class Arena:
    """Shared anonymous memory: the judge writes it, passes its descriptor to a cell, and reads the
    results.

    One kernel process at a time maps it.  After that has ended the next `reserve` takes fresh
    memory, so that nothing which outlives a process can write where a later one has its buffers.
    generation: changes with the memory; no other arena of this process has the same.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.capacity = 0
        self.generation = 0
        self._map: mmap.mmap | None = None
        self.bytes = np.empty(0, np.uint8)
        self._holder: Holder | None = None

    def close(self) -> None:
        """Free the memory, also where a kernel process still maps it."""
        self.bytes = np.empty(0, np.uint8)
        if self._map is None:
            return
        try:
            self._map.close()
        except BufferError:  # a tensor still uses it: garbage collection closes it later
            pass
        else:
            with mmap.mmap(self.fd, self.capacity) as last:
                last.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)
        self._map, self.fd, self.capacity, self._holder = None, -1, 0, None

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes; `generation` changes if the cell must map the arena again."""
        left = self._holder is not None and self._holder.ended
        if left or size > self.capacity:
            self.close()
            self._open(max(1 << 22, 1 << (size - 1).bit_length()))

    def give(self, holder: Holder) -> None:
        """Note that this process maps the memory.  If another one had mapped it, and has ended, it
        gets a copy in fresh memory.  Raises ValueError if the other one has not."""
        if self._holder is not None and self._holder is not holder:
            if not self._holder.ended:
                raise ValueError("arena: another kernel process maps it: give each cell its own")
            laid = self.bytes.copy()
            self.close()
            self._open(len(laid))
            self.bytes[:] = laid
        self._holder = holder

    def _open(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("attention-verify", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.capacity)
        # If a kernel shrank the file, the judge's next read would end it (SIGBUS).
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self._map = mmap.mmap(self.fd, self.capacity)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.generation = next(_GENERATIONS)


def damage_in(
    where: Plan,
    now: np.ndarray[Any, np.dtype[np.uint8]],
    pristine: np.ndarray[Any, np.dtype[np.uint8]],
) -> Damage | None:
    """The bytes of a run that are not those of its pristine image, if there are any."""
    if np.array_equal(now.view(np.uint64), pristine.view(np.uint64)):
        return None
    changed = np.flatnonzero(now != pristine)
    if not len(changed):  # a thread of the kernel still writes
        return Damage("redzone", "at a place that was restored while the judge looked", 1)
    first = int(changed[0])
    inside = [s.name for s in where.slots if s.begin <= first < s.end and s.role == "input"]
    return Damage(inside[0] if inside else "redzone", where.owner(first), len(changed))


@cache
def pattern(dtype: torch.dtype, poison: str) -> Tensor:
    """One element of the poison; not to be changed."""
    if dtype.itemsize == 1:
        return torch.tensor([_BYTES[poison]], dtype=torch.uint8).view(dtype)
    words = np.full(4, POISONS[poison], np.uint16)
    return torch.from_numpy(words).view(torch.uint8)[: dtype.itemsize].clone().view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as integers of the same size."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    )


def negated(tensor: Tensor) -> Tensor:
    """A contiguous copy with every sign bit flipped, also of NaN and zero."""
    words = bits(tensor.clone(memory_format=torch.contiguous_format))
    # The sign bit: the least integer of the dtype, but uint8 has no negative one.
    words.bitwise_xor_(torch.iinfo(words.dtype).min or 1 << 7)
    return words.view(tensor.dtype)


def different(one: Tensor, other: Tensor) -> Tensor:
    """Where the bits of two tensors of the same dtype differ; all NaN count as equal.

    IEEE 754 leaves a NaN's sign and payload open, and on a CPU they depend on the element's place
    in a vector.
    """
    one, other = one.contiguous(), other.contiguous()
    return (bits(one) != bits(other)) & ~(one.isnan() & other.isnan())


def unwritten(tensor: Tensor, poison: str) -> Tensor:
    """Where `tensor` (contiguous) still holds the poison's bits, as booleans.  A finite poison can
    also be a result."""
    return bits(tensor) == bits(pattern(tensor.dtype, poison))
