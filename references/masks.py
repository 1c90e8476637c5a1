"""Masks: which key a query may see.

A `Mask` is a frozen, hashable value with a one-line name that parses back (`parse_mask(mask.name) == mask`).  It is defined
by its predicate `mask.mod(seqlen_q, seqlen_kv)(b, h, q, k)`, which has FlexAttention's signature.  Every mask but `Dense`
sees one interval of keys per row, and says which (`Mask.interval`); a test holds the two forms equal.

Where a mask speaks of a diagonal, `offset = seqlen_kv - seqlen_q` aligns it to the bottom right corner (the last query sees
the last key, as FlashAttention >= 2.1 has it) and `offset = 0` to the top left corner (as torch's `is_causal` has it).
Windows are inclusive on both sides.  Lengths, documents and prefixes are counted from position 0.

Run `python -m references.masks` to see them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Alignment = Literal["br", "tl"]

_UNBOUNDED = "inf"


class MaskNameError(ValueError):
    """A mask name that does not parse."""


@dataclass(frozen=True)
class Mask(ABC):
    """Base of all masks; see the module's docstring for the conventions."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """One line, without blanks or shell characters, that `parse_mask` reads back."""

    @abstractmethod
    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        """The predicate `mod(b, h, q, k) -> bool`, on broadcastable integer tensors, for one shape."""

    @abstractmethod
    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """Visible keys [lo, hi) of row `q` in batch `b`, broadcast and unclamped; None if rows see no single interval."""

    @property
    def atoms(self) -> tuple[Mask, ...]:
        """The masks that this one intersects; itself alone if it is no intersection."""
        return (self,)

    def check(self, batch: int) -> None:  # noqa: B027 - most masks fit every batch
        """Raise ValueError if this mask does not fit a batch of that size."""

    def dense(self, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask as booleans, (batch, heads, seqlen_q, seqlen_kv); True is visible."""
        b, h, q, k = (torch.arange(n, device=device) for n in (batch, heads, seqlen_q, seqlen_kv))
        seen = self.mod(seqlen_q, seqlen_kv, device)(b[:, None, None, None], h[:, None, None], q[:, None], k)
        return seen.expand(batch, heads, seqlen_q, seqlen_kv)

    def row_bounds(
        self, batch: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Visible keys [lo, hi) of every row, two int32 tensors (batch, seqlen_q); hi == lo marks an empty row.

        Raises ValueError for a mask whose rows see no single interval.
        """
        b = torch.arange(batch, device=device)[:, None]
        q = torch.arange(seqlen_q, device=device)[None, :]
        bounds = self.interval(seqlen_q, seqlen_kv, b, q)
        if bounds is None:
            raise ValueError(f"rows of {self.name} do not see one interval of keys")
        low = bounds[0].clamp(0, seqlen_kv).expand(batch, seqlen_q)
        high = torch.maximum(bounds[1].clamp(0, seqlen_kv).expand(batch, seqlen_q), low)
        return low.to(torch.int32), high.to(torch.int32)

    def __and__(self, other: Mask) -> Mask:
        return intersect(self, other)


class _IntervalMask(Mask):
    """A mask whose predicate follows from its interval; `seen_queries` removes whole rows."""

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            bounds = self.interval(seqlen_q, seqlen_kv, b, q)
            assert bounds is not None
            return (k >= bounds[0]) & (k < bounds[1])

        return mod


@dataclass(frozen=True)
class Full(_IntervalMask):
    """Every query sees every key."""

    kind: ClassVar[str] = "full"

    @property
    def name(self) -> str:
        return self.kind

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        return lambda b, h, q, k: (q >= 0) & (k >= 0)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.full_like(q, seqlen_kv)


def _offset(alignment: Alignment, seqlen_q: int, seqlen_kv: int) -> int:
    return seqlen_kv - seqlen_q if alignment == "br" else 0


@dataclass(frozen=True)
class Causal(_IntervalMask):
    """k <= q + offset."""

    alignment: Alignment = "br"
    kind: ClassVar[str] = "causal"

    @property
    def name(self) -> str:
        return self.kind if self.alignment == "br" else f"{self.kind}.tl"

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        offset = _offset(self.alignment, seqlen_q, seqlen_kv)
        return lambda b, h, q, k: k <= q + offset

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q + (_offset(self.alignment, seqlen_q, seqlen_kv) + 1)


@dataclass(frozen=True)
class Window(_IntervalMask):
    """q + offset - left <= k <= q + offset + right; None leaves that side open."""

    left: int | None
    right: int | None
    alignment: Alignment = "br"
    kind: ClassVar[str] = "window"

    @property
    def name(self) -> str:
        sides = ".".join(_UNBOUNDED if side is None else str(side) for side in (self.left, self.right))
        return f"{self.kind}.{sides}" + ("" if self.alignment == "br" else ".tl")

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        offset = _offset(self.alignment, seqlen_q, seqlen_kv)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k >= 0 if self.left is None else k >= q + (offset - self.left)
            return seen & (q >= 0) if self.right is None else seen & (k <= q + (offset + self.right))

        return mod

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = q + _offset(self.alignment, seqlen_q, seqlen_kv)
        low = torch.zeros_like(q) if self.left is None else diagonal - self.left
        high = torch.full_like(q, seqlen_kv) if self.right is None else diagonal + (self.right + 1)
        return low, high


@dataclass(frozen=True)
class Lengths(_IntervalMask):
    """q < q_lengths[b] and k < kv_lengths[b]; zero is a length, and a query past its length sees nothing."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    kind: ClassVar[str] = "lengths"

    @property
    def name(self) -> str:
        return f"{self.kind}.{_join(self.q_lengths)}.{_join(self.kv_lengths)}"

    def check(self, batch: int) -> None:
        if not len(self.q_lengths) == len(self.kv_lengths) == batch:
            raise ValueError(f"mask: {self.name} gives {len(self.kv_lengths)} lengths for a batch of {batch}")

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        q_lengths, kv_lengths = (torch.tensor(n, device=device) for n in (self.q_lengths, self.kv_lengths))
        return lambda b, h, q, k: (q < q_lengths[b]) & (k < kv_lengths[b])

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        q_lengths, kv_lengths = (torch.tensor(n, device=q.device) for n in (self.q_lengths, self.kv_lengths))
        return torch.zeros_like(q), torch.where(q < q_lengths[b], kv_lengths[b], 0)


@dataclass(frozen=True)
class Documents(_IntervalMask):
    """Key and query belong to the same document.

    Documents lie end to end over the keys; the last one extends to the end.  Query q stands at key position q + offset
    (bottom right), so that with seqlen_q == seqlen_kv this is packed self-attention; a query before position 0 sees nothing.
    """

    lengths: tuple[int, ...]
    kind: ClassVar[str] = "documents"

    @property
    def name(self) -> str:
        return f"{self.kind}.{_join(self.lengths)}"

    def _edges(self, device: torch.device) -> Tensor:
        return torch.tensor((0, *self.lengths), device=device).cumsum(0)

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        position = torch.arange(max(seqlen_q, seqlen_kv, 1), device=device)
        last = max(len(self.lengths) - 1, 0)
        document = (position[:, None] >= self._edges(position.device)[1:]).sum(-1).clamp(max=last)
        offset = seqlen_kv - seqlen_q
        return lambda b, h, q, k: (q + offset >= 0) & (document[(q + offset).clamp(min=0)] == document[k])

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        edges = self._edges(q.device)
        position = q + (seqlen_kv - seqlen_q)
        index = (position[..., None] >= edges[1:]).sum(-1).clamp(max=max(len(self.lengths) - 1, 0))
        ends = torch.cat([edges[1:-1], edges.new_full((1,), max(seqlen_kv, 0))]) if self.lengths else edges + seqlen_kv
        return edges[index], torch.where(position >= 0, ends[index], 0)


@dataclass(frozen=True)
class Prefix(_IntervalMask):
    """Prefix-LM: k < length, or causal (bottom right)."""

    length: int
    kind: ClassVar[str] = "prefix"

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.length}"

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        offset = seqlen_kv - seqlen_q
        return lambda b, h, q, k: (k < self.length) | (k <= q + offset)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), (q + (seqlen_kv - seqlen_q + 1)).clamp(min=self.length)


@dataclass(frozen=True)
class Dense(Mask):
    """A seeded random mask, different in every batch and head; each pair is visible with probability percent / 100."""

    percent: int
    seed: int
    kind: ClassVar[str] = "dense"

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.percent}.{self.seed}"

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        word = 0xFFFFFFFF
        seed = self.seed * 0x165667B1 & word

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # Any fixed odd multipliers do; the two multiply-xorshift rounds are those of the MurmurHash3 finaliser.
            x = (b * 0x9E3779B1 + h * 0x85EBCA77 + q * 0xC2B2AE3D + k * 0x27D4EB2F + seed) & word
            x = ((x ^ (x >> 16)) * 0x85EBCA6B) & word
            x = ((x ^ (x >> 13)) * 0xC2B2AE35) & word
            x = x ^ (x >> 16)
            return x * 100 < self.percent * (word + 1)

        return mod

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Intersection(Mask):
    """Visible where every part says so.  `intersect` and `&` build it: flattened, sorted, without repeats."""

    parts: tuple[Mask, ...]
    kind: ClassVar[str] = "intersection"

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def atoms(self) -> tuple[Mask, ...]:
        return self.parts

    def check(self, batch: int) -> None:
        for part in self.parts:
            part.check(batch)

    def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
        mods = [part.mod(seqlen_q, seqlen_kv, device) for part in self.parts]
        return lambda b, h, q, k: reduce(torch.Tensor.__and__, (mod(b, h, q, k) for mod in mods))

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple[Tensor, Tensor] | None:
        bounds = [part.interval(seqlen_q, seqlen_kv, b, q) for part in self.parts]
        if any(bound is None for bound in bounds):
            return None
        lows, highs = zip(*(bound for bound in bounds if bound is not None), strict=True)
        return reduce(torch.maximum, lows), reduce(torch.minimum, highs)


def intersect(*masks: Mask) -> Mask:
    """The intersection of masks, in a canonical order, so that equal sets of parts have one name."""
    parts = {part for mask in masks for part in mask.atoms if not isinstance(part, Full)}
    if not parts:
        return Full()
    ordered = tuple(sorted(parts, key=lambda part: (_ORDER.index(part.kind), part.name)))
    return ordered[0] if len(ordered) == 1 else Intersection(ordered)


def parse_mask(name: str) -> Mask:
    """The mask of that name; raises `MaskNameError` with the part that does not parse."""
    return intersect(*(_parse_atom(part) for part in name.split("+")))


def _parse_atom(name: str) -> Mask:
    kind, *fields = name.split(".")
    try:
        match kind, fields:
            case "full", []:
                return Full()
            case "causal", []:
                return Causal()
            case "causal", ["tl"]:
                return Causal("tl")
            case "window", [left, right]:
                return Window(_side(left), _side(right))
            case "window", [left, right, "tl"]:
                return Window(_side(left), _side(right), "tl")
            case "lengths", [q_lengths, kv_lengths]:
                return Lengths(_split(q_lengths), _split(kv_lengths))
            case "documents", [lengths]:
                return Documents(_split(lengths))
            case "prefix", [length]:
                return Prefix(_count(length))
            case "dense", [percent, seed]:
                return Dense(_count(percent), _count(seed))
    except ValueError:
        pass
    raise MaskNameError(f"not a mask: {name!r} (kinds: {', '.join(_ORDER)}; examples: {', '.join(m.name for m in GALLERY)})")


def _count(text: str) -> int:
    if not text.isdecimal():  # int() would read "1_0" and "+1"
        raise ValueError(text)
    return int(text)


def _side(text: str) -> int | None:
    return None if text == _UNBOUNDED else _count(text)


def _join(lengths: tuple[int, ...]) -> str:
    return "_".join(map(str, lengths))


def _split(text: str) -> tuple[int, ...]:
    return tuple(_count(length) for length in text.split("_")) if text else ()


_ORDER = ("full", "causal", "window", "lengths", "documents", "prefix", "dense")

GALLERY: tuple[Mask, ...] = (
    Full(),
    Causal(),
    Causal("tl"),
    Window(3, 2),
    Window(2, None),
    Window(None, 1, "tl"),
    intersect(Causal(), Window(4, 0)),
    Lengths((9,), (14,)),
    intersect(Causal(), Lengths((10,), (20,))),
    Documents((5, 8, 9)),
    intersect(Causal(), Documents((5, 8, 9))),
    Prefix(6),
    Dense(40, 7),
    intersect(Causal(), Dense(60, 7)),
)


def picture(mask: Mask, seqlen_q: int, seqlen_kv: int) -> str:
    """One character a pair, one line a query, of batch 0 and head 0."""
    rows = mask.dense(1, 1, seqlen_q, seqlen_kv)[0, 0].tolist()
    return "\n".join("".join("█" if seen else "·" for seen in row) for row in rows)


def main() -> None:
    """Print the gallery: each mask's name above its picture, 12 queries by 24 keys."""
    for mask in GALLERY:
        print(f"{mask.name}\n{picture(mask, 12, 24)}\n")


if __name__ == "__main__":
    main()
