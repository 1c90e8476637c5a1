"""Sliding windows along a diagonal, inclusive on both sides, with either alignment."""

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
    count,
    expect_fields,
    offset,
)
from references.tensor import Tensor, torch

_UNBOUNDED = "inf"
_SIDES = (
    *(0, 1, None, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    *(127, 128, 129, 200, 257, 5000),
)
_SHAPES = ("as drawn",) * 4 + ("left open", "right open", "narrow")
_ALIGNMENTS: tuple[Alignment, ...] = ("br", "tl")


@dataclass(frozen=True)
class Window(Atom):
    """q + offset - left <= k <= q + offset + right; None leaves that side open."""

    left: int | None
    right: int | None
    alignment: Alignment = "br"
    kind: ClassVar[str] = "window"
    words: ClassVar[tuple[str, ...]] = ("window", "window.square")
    varies: ClassVar[tuple[Varies, ...]] = ()
    rank: ClassVar[int] = 20

    @property
    def name(self) -> str:
        sides = (_UNBOUNDED if side is None else str(side) for side in (self.left, self.right))
        return ".".join((self.kind, *sides)) + ("" if self.alignment == "br" else ".tl")

    @classmethod
    def parse(cls, fields: Sequence[str]) -> Window:
        expect_fields(fields, 2, 3)
        if any(field != "tl" for field in fields[2:]):
            raise ValueError(fields[2])
        left, right = (None if side == _UNBOUNDED else count(side) for side in fields[:2])
        return Window(left, right, "tl" if fields[2:] else "br")

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        diagonal = offset(self.alignment, seqlen_q, seqlen_kv)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k >= 0 if self.left is None else k >= q + (diagonal - self.left)
            return seen & (q >= 0 if self.right is None else k <= q + (diagonal + self.right))

        return mod

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval:
        diagonal = q + offset(self.alignment, seqlen_q, seqlen_kv)
        low = torch.zeros_like(q) if self.left is None else diagonal - self.left
        if self.right is None:
            return low, torch.full_like(q, seqlen_kv)
        return low, diagonal + (self.right + 1)

    @classmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Window:
        left, right = choose.one_of(_SIDES), choose.one_of(_SIDES)
        alignment = choose.one_of(_ALIGNMENTS)
        match choose.one_of(_SHAPES):
            case "left open":
                return Window(None, right, alignment)
            case "right open":
                return Window(left, None, alignment)
            case "narrow":
                return Window(min(left or 0, 3), min(right or 0, 3), alignment)
        return Window(left, right, alignment)

    @classmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """The diagonal can leave the keys if lengths differ."""
        return not square

    @classmethod
    def gallery(cls) -> tuple[Mask, ...]:
        return Window(3, 2), Window(2, None), Window(None, 1, "tl")

    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """Half as wide, or a little wider if it cannot be narrower."""
        left, right = (5 if n is None else n // 2 or n + 3 for n in (self.left, self.right))
        return Window(left, right, self.alignment)

    def restrict(self, view: View) -> Iterator[Mask]:
        """The window along the diagonal of the part, if both sides stay at 0 or more."""
        for alignment, moved in aligned_offsets(self.alignment, view).items():
            left = None if self.left is None else self.left + moved
            right = None if self.right is None else self.right - moved
            if all(side is None or side >= 0 for side in (left, right)):
                yield Window(left, right, alignment)

    def doubled(self, *, rows: bool) -> Mask:
        left = None if self.left is None else 2 * self.left + 1
        right = None if self.right is None else 2 * self.right
        return Window(left, right, self.alignment)


def aligned_offsets(alignment: Alignment, view: View) -> dict[Alignment, int]:
    """By alignment, how many keys its diagonal in the part lies past that of the whole problem."""
    whole = offset(alignment, view.seqlen_q, view.seqlen_kv) + view.rows.start - view.keys.start
    rows, keys = len(view.rows), len(view.keys)
    return {side: offset(side, rows, keys) - whole for side in _ALIGNMENTS}
