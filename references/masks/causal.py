"""Causal masks, aligned to the bottom right corner ("causal") or to the top left ("causal.tl")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from references.masks.base import (
    Alignment,
    Atom,
    Choose,
    Device,
    Interval,
    Mask,
    MaskMod,
    Varies,
    View,
    expect_fields,
    offset,
)
from references.masks.window import Window, aligned_offsets
from references.tensor import Tensor, torch


@dataclass(frozen=True)
class Causal(Atom):
    """k <= q + offset."""

    alignment: Alignment = "br"
    kind: ClassVar[str] = "causal"
    words: ClassVar[tuple[str, ...]] = ("causal", "causal.tl", "causal.square")
    varies: ClassVar[tuple[Varies, ...]] = ()
    rank: ClassVar[int] = 10

    @property
    def name(self) -> str:
        return self.word

    @property
    def word(self) -> str:
        return self.kind if self.alignment == "br" else f"{self.kind}.tl"

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Causal:
        expect_fields(fields, 0, 1)
        if fields and fields[0] != "tl":
            raise ValueError(fields[0])
        return Causal("tl" if fields else "br")

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        diagonal = offset(self.alignment, seqlen_q, seqlen_kv)
        return lambda b, h, q, k: k <= q + diagonal

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        return torch.zeros_like(q), q + (offset(self.alignment, seqlen_q, seqlen_kv) + 1)

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Causal:
        return Causal("tl" if word == "causal.tl" else "br")

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """Aligned bottom right, queries can stand before the first key if lengths differ."""
        return word == "causal" and not square

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return Causal(), Causal("tl"), Causal() & Window(4, 0)

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        return Causal("tl" if self.alignment == "br" else "br")

    def restrict(self, view: View) -> Iterator[Mask]:
        """The alignment with the diagonal of the part, or a window that ends at that diagonal."""
        offsets = aligned_offsets(self.alignment, view)
        yield from (Causal(side) for side, moved in offsets.items() if moved == 0)
        yield from Window(None, 0, self.alignment).restrict(view)

    def doubled(self, *, rows: bool) -> Mask:
        return self
