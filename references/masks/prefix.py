"""Prefix-LM masks: causal, except for a prefix that every query sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from references.masks.base import (
    Atom,
    Choose,
    Device,
    Interval,
    Mask,
    MaskMod,
    Varies,
    View,
    count,
    expect_fields,
)
from references.tensor import Tensor, torch


@dataclass(frozen=True)
class Prefix(Atom):
    """Prefix-LM: k < length, or causal (bottom right)."""

    length: int
    kind: ClassVar[str] = "prefix"
    words: ClassVar[tuple[str, ...]] = ("prefix",)
    varies: ClassVar[tuple[Varies, ...]] = ()
    rank: ClassVar[int] = 50

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.length}"

    @property
    def brief(self) -> str:
        return self.kind

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Prefix:
        expect_fields(fields, 1)
        return Prefix(count(fields[0]))

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        offset = seqlen_kv - seqlen_q
        return lambda b, h, q, k: (k < self.length) | (k <= q + offset)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        return torch.zeros_like(q), (q + (seqlen_kv - seqlen_q + 1)).clamp(min=self.length)

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Prefix:
        inner = {0, 1, 15, 16, 17, 63, 64, 65, 128, seqlen_kv // 2}
        ends = {max(seqlen_kv - 1, 0), seqlen_kv, seqlen_kv + 5}
        return Prefix(choose.one_of(tuple(sorted(inner | ends))))

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """Queries can stand before the first key if lengths differ and the prefix is empty."""
        return not square

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return (Prefix(6),)

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        return Prefix(self.length // 2 or 16)

    def restrict(self, view: View) -> Iterator[Mask]:
        yield Prefix(max(self.length - view.keys.start, 0))

    def doubled(self, *, rows: bool) -> Mask:
        return Prefix(2 * self.length)
