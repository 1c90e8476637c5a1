"""What a storage is, what each kind says of itself, and the registry of kinds.

A kind is a subclass of `Storage`.  Python runs the checks of `Storage.__init_subclass__` when the
class is made: a kind that lacks something is refused there, in one line, and a complete one is
registered.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from references.kinds import refuse_incomplete
from references.masks import Choose
from references.premises import EVERY_PREMISE, Premise
from references.tensor import Tensor
from verify.variant import STRIDED

Shape4 = tuple[int, int, int, int]


class ProblemError(ValueError):
    """A Problem, or the text of one, that makes no sense; the message names the field."""


@dataclass(frozen=True)
class Piece:
    """One strided buffer, all of it counted in elements.

    shape, strides: as a kernel sees it.
    offset, behind: unused elements of its allocation before the first one and after the last.
    dtype: of its elements; "" is the dtype of the tensor's values.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    behind: int = 0
    dtype: str = ""

    @staticmethod
    def packed(shape: tuple[int, ...], dtype: str = "") -> Piece:
        """A contiguous buffer."""
        sizes = [max(n, 1) for n in shape]
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        return Piece(shape, strides, dtype=dtype)

    @property
    def extent(self) -> int:
        """Elements from the start of the allocation to just behind the last one."""
        if 0 in self.shape:
            return self.offset
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.offset + 1 + reach

    def aligned(self, itemsize: int, alignment: int) -> bool:
        """Whether every row begins at a multiple of `alignment` bytes, counted from an aligned
        allocation."""
        outer = zip(self.strides[:-1], self.shape[:-1], strict=True)
        steps = [step for step, size in outer if size > 1]
        return 0 in self.shape or not any(n * itemsize % alignment for n in (self.offset, *steps))


@dataclass(frozen=True)
class Storage(ABC):
    """How a logical tensor (batch, heads, seqlen, head_dim) lies in memory, and what a kernel sees.

    A tensor is one or several pieces, each a buffer of the arena.  A kernel gets the pieces as they
    are: of strided storage the tensor itself, of every other one `AttentionArgs.stored`.  Bytes of
    a piece that `write` leaves alone are gaps: they stay canaries, and a run that changes one is
    convicted.

    A subclass must define what is abstract here, and `word`.  Each of its fields needs a default:
    the class without arguments is the simplest storage of the kind.

    word: the kind in `Support.storages`, in lower-case letters.
    heads: what the first field of a name can be; the word, unless the kind says otherwise.
    holds: the tensors that can lie so.  Only inputs can: outputs, what a backward gets of them and
    gradients are strided, because the judge reads them through one view.
    breaks: the premises of oracles that do not hold, STRIDED_STORAGE at least.  A kind that says
    nothing breaks all.
    """

    word: ClassVar[str]
    heads: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[tuple[str, ...]] = ("k", "v")
    breaks: ClassVar[frozenset[Premise]] = EVERY_PREMISE

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        _check(cls)
        cls.heads = cls.heads or (cls.word,)
        KINDS[cls.word] = cls

    @property
    @abstractmethod
    def name(self) -> str:
        """One line, without blanks, commas or shell characters, that `parse_storage` reads back.

        Its fields have dots between them, and the first is one of `heads`.
        """

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """The storage of that name; raises ValueError (ProblemError if it says what is wrong)."""

    @abstractmethod
    def pieces(self, shape: Shape4) -> dict[str, Piece]:
        """The buffers of a tensor of that shape, by their names in this storage.

        A piece of the name "" has the tensor's own name.
        """

    @abstractmethod
    def write(self, values: Tensor, views: Mapping[str, Tensor]) -> None:
        """Write a tensor into its pieces.

        values: (batch, heads, seqlen, head_dim), of size 1 in each dimension of `expand`.
        views: the pieces as a kernel sees them, full of canaries.
        """

    @classmethod
    def draw(cls, choose: Choose) -> Self:
        """A storage of this kind, weighted towards edges; one for all tensors that it holds.

        Its rows are aligned to 16 bytes; where a support asks for none, `misaligned` is drawn too.
        Strided tensors are drawn one by one instead, in verify/problem/strategies.py.
        """
        return cls()

    @property
    def expand(self) -> str:
        """Dimensions ("b", "h") that are stored once for all sequences or heads."""
        return ""

    @property
    def sibling(self) -> Storage:
        """Another storage of the same kind, if there is one."""
        return self

    @property
    def misaligned(self) -> Storage | None:
        """One of the same kind whose rows are not aligned to 16 bytes in any dtype, if there is
        one."""
        return None

    @property
    def gradient(self) -> Storage:
        """How the gradient of such a tensor lies: always strided."""
        return KINDS[STRIDED]()

    @property
    def label(self) -> str:
        """The storage in messages and tables."""
        return f"{self.word} storage"

    def extent(self, shape: Shape4) -> int:
        """Elements of all pieces, from the start of each allocation to just behind its last
        element."""
        return sum(piece.extent for piece in self.pieces(shape).values())

    def aligned(self, shape: Shape4, itemsize: int, alignment: int) -> bool:
        """Whether every row of its values begins at a multiple of `alignment` bytes, counted from
        aligned allocations."""
        values = (piece for piece in self.pieces(shape).values() if not piece.dtype)
        return all(piece.aligned(itemsize, alignment) for piece in values)


KINDS: dict[str, type[Storage]] = {}
"""The registered kinds by word, in the order of registration."""


def _check(cls: type[Storage]) -> None:
    """Raise TypeError if that class cannot be a kind of storage."""
    refuse_incomplete(cls, "storage", ("word",), "Storage in verify/problem/storage/base.py")
    if not re.fullmatch(r"[a-z]+", cls.word):
        said = f"{cls.__name__}.word {cls.word!r} is not of lower-case letters alone"
        raise TypeError(f"storage: {said}")
    known = {head for kind in KINDS.values() for head in (kind.word, *kind.heads)}
    if known & {cls.word, *cls.heads}:
        taken = sorted(known & {cls.word, *cls.heads})[0]
        raise TypeError(f"storage: {cls.__name__}: {taken!r} is the name of another kind")
    if cls.word == STRIDED:
        return
    if not set(cls.holds) <= {"q", "k", "v"}:
        raise TypeError(f"storage: {cls.__name__}.holds {cls.holds!r} can be of q, k and v only")
    if Premise.STRIDED_STORAGE not in cls.breaks:
        raise TypeError(f"storage: {cls.__name__}.breaks lacks Premise.STRIDED_STORAGE")


def storage_words() -> tuple[str, ...]:
    """All words that `Support.storages` can list, strided first."""
    return tuple(KINDS)


def storage_kind(word: str) -> type[Storage]:
    """The kind of that word; raises ProblemError for another."""
    if word not in KINDS:
        raise ProblemError(f"storages: {word!r} is none of {', '.join(KINDS)}")
    return KINDS[word]


def parse_storage(text: str) -> Storage:
    """The storage of that name; raises ProblemError with what does not parse."""
    head = text.partition(".")[0]
    for kind in KINDS.values():
        if head in kind.heads:
            try:
                return kind.parse(text)
            except ProblemError:
                raise
            except ValueError as error:
                raise ProblemError(f"layout: {text!r} is no {kind.word} storage: {error}") from None
    heads = ", ".join(head for kind in KINDS.values() for head in kind.heads)
    raise ProblemError(f"layout: order {head!r} is none of {heads}")
