"""Documents: packed sequences that do not see each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

_SIZES = (1, 2, 3, 5, 7, 15, 16, 17, 33, 63, 64, 65, 127, 129, 0)


@dataclass(frozen=True)
class Documents(Atom):
    """Key and query belong to the same document.

    Documents lie end to end over the keys; the last one extends to the end.  Query q stands at key
    position q + offset (bottom right), so that with seqlen_q == seqlen_kv this is packed
    self-attention; a query before position 0 sees nothing.
    """

    lengths: tuple[int, ...]
    kind: ClassVar[str] = "documents"
    words: ClassVar[tuple[str, ...]] = ("documents",)
    varies: ClassVar[tuple[Varies, ...]] = ()
    rank: ClassVar[int] = 40

    @property
    def name(self) -> str:
        return f"{self.kind}.{join(self.lengths)}"

    @property
    def brief(self) -> str:
        return self.kind

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Documents:
        expect_fields(fields, 1)
        return Documents(split(fields[0]))

    @property
    def _last(self) -> int:
        return max(len(self.lengths) - 1, 0)

    def _edges(self, device: torch.device) -> Tensor:
        return torch.tensor((0, *self.lengths), device=device).cumsum(0)

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        position = torch.arange(max(seqlen_q, seqlen_kv, 1), device=device)
        past = position[:, None] >= self._edges(position.device)[1:]
        document = past.sum(-1).clamp(max=self._last)
        offset = seqlen_kv - seqlen_q

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            at = q + offset
            return (at >= 0) & (document[at.clamp(min=0)] == document[k])

        return mod

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        edges = self._edges(q.device)
        position = q + (seqlen_kv - seqlen_q)
        index = (position[..., None] >= edges[1:]).sum(-1).clamp(max=self._last)
        end = edges.new_full((1,), max(seqlen_kv, 0))
        ends = torch.cat([edges[1:-1], end]) if self.lengths else edges + seqlen_kv
        return edges[index], torch.where(position >= 0, ends[index], 0)

    @classmethod
    def draw(
        cls,
        choose: Choose,
        word: str,
        batch: int,
        seqlen_q: int,
        seqlen_kv: int,
    ) -> Documents:
        cuts: list[int] = []
        left = seqlen_kv
        for size in choose.several(_SIZES, most=5):
            cuts.append(min(size, left))
            left -= cuts[-1]
        return Documents((*cuts, left))

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """Queries can stand before the first key if lengths differ."""
        return not square

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return Documents((5, 8, 9)), Causal() & Documents((5, 8, 9))

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """Every document is split in two."""
        return Documents(tuple(half for n in self.lengths for half in (n // 2, n - n // 2)))

    def restrict(self, view: View) -> Iterator[Mask]:
        last = len(view.keys)
        ends = [min(max(end - view.keys.start, 0), last) for end in accumulate(self.lengths)]
        yield Documents(tuple(end - start for start, end in pairwise((0, *ends))))

    def doubled(self, *, rows: bool) -> Mask:
        return Documents(tuple(2 * n for n in self.lengths))

    def halved(self) -> Mask:
        return Documents(tuple((n + 1) // 2 for n in self.lengths))
