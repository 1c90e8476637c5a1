"""Lengths: sequences of a batch that end before seqlen_q and seqlen_kv, as in a padded batch."""

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
    join,
    split,
)
from references.masks.causal import Causal
from references.tensor import Tensor, torch


@dataclass(frozen=True)
class Lengths(Atom):
    """q < q_lengths[b] and k < kv_lengths[b].

    A length can be 0, and a query past its length sees nothing.
    """

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    kind: ClassVar[str] = "lengths"
    words: ClassVar[tuple[str, ...]] = ("lengths",)
    varies: ClassVar[tuple[Varies, ...]] = ("batch",)
    rank: ClassVar[int] = 30
    by_row: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.kind}.{join(self.q_lengths)}.{join(self.kv_lengths)}"

    @property
    def brief(self) -> str:
        return self.kind

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Lengths:
        expect_fields(fields, 2)
        return Lengths(split(fields[0]), split(fields[1]))

    def check(self, batch: int) -> None:
        if not len(self.q_lengths) == len(self.kv_lengths) == batch:
            given = f"{self.name} gives {len(self.kv_lengths)} lengths"
            raise ValueError(f"mask: {given} for a batch of {batch}")

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        lengths = (self.q_lengths, self.kv_lengths)
        q_lengths, kv_lengths = (torch.tensor(n, device=device) for n in lengths)
        return lambda b, h, q, k: (q < q_lengths[b]) & (k < kv_lengths[b])

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        lengths = (self.q_lengths, self.kv_lengths)
        q_lengths, kv_lengths = (torch.tensor(n, device=q.device) for n in lengths)
        return torch.zeros_like(q), torch.where(q < q_lengths[b], kv_lengths[b], 0)

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Lengths:
        drawn = [(choose.length(seqlen_q), choose.length(seqlen_kv)) for _ in range(batch)]
        return Lengths(tuple(q for q, _ in drawn), tuple(kv for _, kv in drawn))

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """Rows past the length of their sequence are empty, and rows of a sequence without keys."""
        return True

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return Lengths((9,), (14,)), Causal() & Lengths((10,), (20,))

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """Half of each length, or the whole length if the half is 0."""
        return Lengths(
            tuple(n // 2 or seqlen_q for n in self.q_lengths),
            tuple(n // 2 or seqlen_kv for n in self.kv_lengths),
        )

    def restrict(self, view: View) -> Iterator[Mask]:
        yield Lengths(
            tuple(_within(self.q_lengths[b], view.rows) for b in view.batch),
            tuple(_within(self.kv_lengths[b], view.keys) for b in view.batch),
        )

    def doubled(self, *, rows: bool) -> Mask:
        q_lengths = tuple(n * (1 + rows) for n in self.q_lengths)
        return Lengths(q_lengths, tuple(2 * n for n in self.kv_lengths))

    def halved(self) -> Mask:
        halves = (tuple((n + 1) // 2 for n in each) for each in (self.q_lengths, self.kv_lengths))
        return Lengths(*halves)

    def extended(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        return Lengths((*self.q_lengths, seqlen_q), (*self.kv_lengths, seqlen_kv))


def _within(length: int, positions: range) -> int:
    """How many of these positions lie before that length."""
    return min(max(length - positions.start, 0), len(positions))
