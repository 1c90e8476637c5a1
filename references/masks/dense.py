"""Random masks, in which rows see no single interval of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from references.masks.base import (
    Atom,
    Choose,
    Device,
    Mask,
    MaskMod,
    Varies,
    View,
    count,
    expect_fields,
)
from references.masks.causal import Causal
from references.tensor import Tensor

_PERCENTS = (50, 100, 90, 99, 10, 1, 0)


@dataclass(frozen=True)
class Dense(Atom):
    """A seeded random mask, different in every batch and head.

    Each pair is visible with probability percent / 100.
    """

    percent: int
    seed: int
    kind: ClassVar[str] = "dense"
    words: ClassVar[tuple[str, ...]] = ("dense",)
    varies: ClassVar[tuple[Varies, ...]] = ("batch", "head")
    rank: ClassVar[int] = 60

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.percent}.{self.seed}"

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Dense:
        expect_fields(fields, 2)
        return Dense(count(fields[0]), count(fields[1]))

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        word = 0xFFFFFFFF
        seed = self.seed * 0x165667B1 & word

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # Any fixed odd multipliers do; the two multiply-xorshift rounds are those of the
            # MurmurHash3 finaliser.
            x = b * 0x9E3779B1 + h * 0x85EBCA77 + q * 0xC2B2AE3D + k * 0x27D4EB2F + seed
            x = x & word
            x = ((x ^ (x >> 16)) * 0x85EBCA6B) & word
            x = ((x ^ (x >> 13)) * 0xC2B2AE35) & word
            x = x ^ (x >> 16)
            return x * 100 < self.percent * (word + 1)

        return mod

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> None:
        return None

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Dense:
        return Dense(choose.one_of(_PERCENTS), choose.seed())

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        return True

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return Dense(40, 7), Causal() & Dense(60, 7)

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        return replace(self, seed=self.seed ^ 1)

    def restrict(self, view: View) -> Iterator[Mask]:
        """Positions decide what is visible, so only the first rows and keys keep this mask."""
        yield self

    def doubled(self, *, rows: bool) -> None:
        return None
