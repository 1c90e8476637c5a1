"""Full: no mask."""

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
    expect_fields,
)
from references.masks.causal import Causal
from references.tensor import Tensor, torch


@dataclass(frozen=True)
class Full(Atom):
    """Every query sees every key."""

    kind: ClassVar[str] = "full"
    words: ClassVar[tuple[str, ...]] = ("full",)
    varies: ClassVar[tuple[Varies, ...]] = ()
    rank: ClassVar[int] = 0
    by_row: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.kind

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Full:
        expect_fields(fields, 0)
        return Full()

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        return lambda b, h, q, k: (q >= 0) & (k >= 0)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        return torch.zeros_like(q), torch.full_like(q, seqlen_kv)

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Full:
        return Full()

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        return False

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return (Full(),)

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """There is no other full mask; a causal one is the nearest that hides something."""
        return Causal()

    def restrict(self, view: View) -> Iterator[Mask]:
        yield self

    def doubled(self, *, rows: bool) -> Mask:
        return self
