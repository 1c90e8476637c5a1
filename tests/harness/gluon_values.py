"""What the programs of a Gluon kernel hold on the CPU (see `gluon_host`): numbers, pointers, tiles
in shared memory, tensors as the copy engine sees them, and the events that they record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Name = tuple[str, int]
NO_CLUSTER = SimpleNamespace(cga_layout=[])  # the layout of a tile that one CTA holds alone


@dataclass(frozen=True)
class Event:
    """One thing that a thread asks of the machine.

    kind: "init", "fence", "meet", "expect", "copy", "wait", "wgmma" (it begins to read), "done" (at
    most `number` wgmma are left), "load" and "store" (of the thread itself) or "invalidate"; of a
    cluster "announce" (of initialised barriers), "arrive" and "await".
    barrier: its name, as (array, number); tiles: those of tiles in shared memory.
    number: arrivals of an init, bytes of an expect or of a copy into one CTA, the parity of a wait;
    1 for the fence of a whole cluster.
    ctas: those into which one copy writes; none: each CTA copies what is its own.
    what: the operand and the first row of a copy, or the first column where rows begin at 0.
    leader: one thread does it.
    """

    kind: str
    barrier: Name | None = None
    tiles: tuple[Name, ...] = ()
    number: int = 0
    ctas: tuple[int, ...] = ()
    what: tuple[str, int] = ("", 0)
    leader: bool = False


class Int(int):
    """A number that can be converted, as those of a program can."""

    def to(self, dtype: object) -> Int:
        return self

    def __floordiv__(self, other: int) -> Int:
        return Int(int(self) // other)

    def __mod__(self, other: int) -> Int:
        return Int(int(self) % other)


@dataclass(frozen=True)
class Place:
    """A pointer, or a tensor of pointers, into a tensor's storage."""

    storage: Tensor
    offset: Any

    @staticmethod
    def of(tensor: Tensor) -> Place:
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Place(storage, tensor.storage_offset())

    def __add__(self, step: Any) -> Place:
        return Place(self.storage, self.offset + step)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.storage.dtype)


@dataclass
class Shared:
    """An array of tiles or barriers in shared memory; `number` is None for all of it."""

    events: list[Event]
    name: str
    shape: tuple[int, ...]
    values: Tensor
    number: int | None = None

    def index(self, number: int) -> Shared:
        if not 0 <= number < self.shape[0]:
            raise IndexError(f"{self.name} has no place {number}")
        return Shared(self.events, self.name, self.shape[1:], self.values[number], int(number))

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number or 0

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.events, self.name, (), self.values.permute(order), self.number)

    def reshape(self, shape: Sequence[int]) -> Shared:
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{self.name}: {self.shape} is no {shape}")
        return self

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        if dtype != self.values.dtype:
            raise ValueError(f"{self.name}: {self.values.dtype} is no {dtype}")
        return self.reshape(shape)

    def load(self, layout: object) -> Tensor:
        self.events.append(Event("load", tiles=(self.key,)))
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.events.append(Event("store", tiles=(self.key,)))
        self.values.copy_(values)


@dataclass(frozen=True)
class Copied:
    """A tensor as the copy engine sees it, made of what `kernels.gluon.host.descriptor` gives."""

    name: str
    source: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.source.base.dtype

    @property
    def shape(self) -> list[int]:
        return self.source.shape

    @property
    def block_shape(self) -> list[int]:
        return self.source.block_shape

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=math.prod(self.block_shape) * self.dtype.itemsize)

    @property
    def layout(self) -> Any:
        return self.source.layout

    @property
    def split(self) -> bool:
        """Whether each CTA of a cluster holds a part of a tile of its own."""
        return any(map(any, self.layout.cga_layout))

    @property
    def nbytes_per_cta(self) -> int:
        whole: int = self.block_type.nbytes
        return whole >> sum(map(any, self.layout.cga_layout))

    def box(self, batch: int, head: int, *place: int) -> Tensor:
        """The tile whose first element is there; elements out of bounds are zeros."""
        base = self.source.base
        whole = torch.as_strided(base, self.shape, self.source.strides, base.storage_offset())
        if not (0 <= batch < self.shape[0] and 0 <= head < self.shape[1]):
            raise IndexError(f"{self.name}: no head {head} of batch {batch}")
        sizes = self.block_shape[2:]
        cut = tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True))
        inside = whole[(batch, head, *cut)]
        box = torch.zeros(*sizes, dtype=self.dtype)
        box[tuple(map(slice, inside.shape))] = inside
        return box.reshape(-1, sizes[-1])

    @staticmethod
    def first(place: Sequence[int]) -> int:
        """The first row of a box at that place, or its first column where rows begin at 0."""
        *halves, row, column = place[2:]
        return int((2 * row if halves else row) + column)


class Names(SimpleNamespace):
    """A module's stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the host model has no stand-in for {name!r}: add it there")


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _largest(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))
    return max(x, y)


def _least(x: Any, y: Any) -> Any:
    return -_largest(-x, -y)


def _reduced(reduce: Any) -> Any:
    def over(x: Tensor, axis: int) -> Any:
        values = reduce(x, axis)
        return values if values.ndim else Int(values.item())

    return over


def _load(place: Place) -> Tensor:
    return place.storage[place.offset]


def _store(place: Place, values: Tensor, mask: Tensor) -> None:
    place.storage[torch.broadcast_to(place.offset, mask.shape)[mask]] = values[mask]


def _fma(x: Tensor, y: Tensor | float, z: Tensor) -> Tensor:
    """x y + z in fp32: the product is exact in fp64."""
    factor = torch.as_tensor(y, dtype=torch.float32).double()
    return (x.double() * factor + z.double()).float()


def _assembly(
    text: str, constraints: str, x: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int
) -> Tensor:
    """The one piece of PTX that there is: casts to nearest that saturate, in the order of bytes."""
    if (constraints, is_pure, pack) != ("=r,r,r,r,r", True, 4):
        raise ValueError(f"four fp32 come as one register, and not by {constraints}, {pack}")
    kinds = {torch.float8_e4m3fn: "e4m3x2", torch.float8_e5m2: "e5m2x2"}
    (values,) = x
    for half, pair in (("low", "$2, $1"), ("high", "$4, $3")):
        if f"cvt.rn.satfinite.{kinds[dtype]}.f32 {half}, {pair};" not in text:
            raise ValueError(f"the host model has no such assembly: {text}")
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _same(value: Any) -> Any:
    return value


def constant(*shape: Any, **keywords: Any) -> None:
    return None


SHARED_NAMES = {
    "constexpr": _same,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float8e4nv": torch.float8_e4m3fn,
    "float8e5": torch.float8_e5m2,
    "inline_asm_elementwise": _assembly,
    "static_range": range,
    "cdiv": lambda x, y: -(-x // y),
    "where": _where,
    "maximum": _largest,
    "minimum": _least,
    "max": _reduced(torch.amax),
    "min": _reduced(torch.amin),
    "sum": _reduced(torch.sum),
    "load": _load,
    "store": _store,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "abs": abs,
    "fma": _fma,
}
