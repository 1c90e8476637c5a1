"""Transposed storage of K or of V: (batch, heads, head_dim, seqlen).

Many raw-MMA kernels take K so, and kernels for 8-bit inputs V: both 8-bit operands of a matrix
instruction run along the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from references.masks import Choose
from references.premises import Premise
from references.tensor import Tensor
from verify.problem.storage.base import Piece, ProblemError, Shape4, Storage

_UNIT = 16  # elements: a multiple of 16 bytes in every dtype


@dataclass(frozen=True)
class Transposed(Storage):
    """One row of keys per column of head_dim; a name is the word and the pitch (transposed.p8).

    A kernel gets `stored["k"].tensors[""]`, of shape (batch, heads, head_dim, seqlen).  A row takes
    seqlen elements, rounded up to a multiple of 16, and the pitch.  What lies behind its last key
    is a gap.

    pitch: further unused elements behind every row.
    """

    pitch: int = 0
    word: ClassVar[str] = "transposed"
    holds: ClassVar[tuple[str, ...]] = ("k",)
    breaks: ClassVar[frozenset[Premise]] = frozenset({Premise.STRIDED_STORAGE})

    def __post_init__(self) -> None:
        if self.pitch < 0:
            raise ProblemError("layout: pitch counts elements and cannot be negative")

    @property
    def name(self) -> str:
        return f"{self.word}.p{self.pitch}" if self.pitch else self.word

    @classmethod
    def parse(cls, text: str) -> Transposed:
        _, dot, pitch = text.partition(".")
        if dot and not (pitch[:1] == "p" and pitch[1:].isdecimal()):
            raise ProblemError(f"layout: {text!r} is not {cls.word} storage (as {cls.word}.p8)")
        return cls(int(pitch[1:] or 0))

    @classmethod
    def draw(cls, choose: Choose) -> Transposed:
        return cls(choose.one_of((0, _UNIT, 4 * _UNIT, 9 * _UNIT)))

    def pieces(self, shape: Shape4) -> dict[str, Piece]:
        batch, heads, keys, dim = shape
        row = -(-keys // _UNIT) * _UNIT + self.pitch
        strides = (heads * dim * row, dim * row, row, 1)
        return {"": Piece((batch, heads, dim, keys), strides, behind=row - keys)}

    def write(self, values: Tensor, views: Mapping[str, Tensor]) -> None:
        views[""].copy_(values.mT)

    @property
    def sibling(self) -> Transposed:
        return replace(self, pitch=0 if self.pitch else _UNIT)

    @property
    def misaligned(self) -> Transposed:
        return replace(self, pitch=self.pitch // _UNIT * _UNIT + 1)


@dataclass(frozen=True)
class TransposedV(Transposed):
    """V stored as `Transposed` stores K; a kernel gets `stored["v"].tensors[""]`, of shape (batch,
    heads, head_dim_v, seqlen)."""

    word: ClassVar[str] = "transposedv"
    heads: ClassVar[tuple[str, ...]] = ("transposedv",)
    holds: ClassVar[tuple[str, ...]] = ("v",)
