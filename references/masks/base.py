"""The base classes of masks, and the registry of their kinds.

A kind is a subclass of `Atom`.  Python runs the checks of `Atom.__init_subclass__` when it creates
the class: an incomplete kind is refused there, in one line, and a complete one is registered.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

from references.kinds import refuse_incomplete
from references.tensor import Tensor, torch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Alignment = Literal["br", "tl"]
Varies = Literal["batch", "head"]
Device: TypeAlias = "torch.device | str"
Interval = tuple[Tensor, Tensor]

SQUARE = ".square"
"""End of a word that is valid only if seqlen_q == seqlen_kv."""

_T = TypeVar("_T")


class MaskNameError(ValueError):
    """A mask name does not parse, or a word names no kind of mask."""


class Choose(Protocol):
    """How a kind of mask draws its parameters; the judge provides it."""

    def one_of(self, values: tuple[_T, ...]) -> _T:
        """One of those values, which have one type; the simplest comes first."""

    def several(self, values: tuple[_T, ...], most: int) -> list[_T]:
        """A list of 0 to `most` of those values, with repeats; the simplest value comes first."""

    def length(self, whole: int) -> int:
        """A length in [0, whole], often beside a multiple of 16; `whole` is the simplest."""

    def seed(self) -> int:
        """A seed in [0, 2^16)."""


@dataclass(frozen=True)
class View:
    """A part of a problem: some of its sequences, queries and keys.

    seqlen_q, seqlen_kv: lengths of the whole problem; batch, rows, keys: positions in it.
    """

    seqlen_q: int
    seqlen_kv: int
    batch: range
    rows: range
    keys: range


@dataclass(frozen=True)
class Mask(ABC):
    """The base of all masks; the package's docstring has the conventions."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """One line, without blanks or shell characters, that `parse_mask` reads back."""

    @abstractmethod
    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        """The predicate `mod(b, h, q, k) -> bool` for one shape, on broadcastable integers."""

    @abstractmethod
    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval | None:
        """Visible keys [lo, hi) of row `q` in batch `b`, broadcast and unclamped.

        None if rows see no single interval.
        """

    @property
    @abstractmethod
    def atoms(self) -> tuple[Atom, ...]:
        """The masks that this one intersects; itself alone if it is no intersection."""

    def check(self, batch: int) -> None:  # noqa: B027 - most masks fit every batch
        """Raise ValueError if this mask does not fit a batch of that size."""

    def dense(
        self,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        device: Device = "cpu",
    ) -> Tensor:
        """The mask as booleans, (batch, heads, seqlen_q, seqlen_kv); True is visible."""
        b, h, q, k = (torch.arange(n, device=device) for n in (batch, heads, seqlen_q, seqlen_kv))
        mod = self.mod(seqlen_q, seqlen_kv, device)
        seen = mod(b[:, None, None, None], h[:, None, None], q[:, None], k)
        return seen.expand(batch, heads, seqlen_q, seqlen_kv)

    def row_bounds(
        self,
        batch: int,
        seqlen_q: int,
        seqlen_kv: int,
        device: Device = "cpu",
    ) -> Interval:
        """Visible keys [lo, hi) of every row, two int32 tensors (batch, seqlen_q).

        hi == lo marks an empty row.  Raises ValueError if rows see no single interval.
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


@dataclass(frozen=True)
class Atom(Mask):
    """A mask of one kind.

    A subclass must define every method that is abstract here or in `Mask`, and these attributes
    except the last two:
    kind: its name, lower-case letters.  A mask's name is the kind and its parameters, with dots
    between them.
    words: the words for this kind in `Support.masks`: the kind itself, or the kind, a dot and more.
    A word that ends in ".square" allows all masks of the kind if seqlen_q == seqlen_kv; problems
    are drawn by the other words.
    varies: the dimensions along which a row's keys can differ at one row number: "batch", "head".
    rank: the order of kinds in lists, and of parts in names; equal ranks are ordered by kind.
    by_row: whether the keys that a row sees depend on the row's number (other than a row past the
    end of its sequence).
    """

    kind: ClassVar[str]
    words: ClassVar[tuple[str, ...]]
    varies: ClassVar[tuple[Varies, ...]]
    rank: ClassVar[int] = 100
    by_row: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        _check(cls)
        KINDS[cls.kind] = cls

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return (self,)

    @property
    def word(self) -> str:
        """The word of `words` that allows this mask, and that draws it."""
        return self.kind

    @property
    def brief(self) -> str:
        """The mask in the reason of a refusal."""
        return self.name

    @classmethod
    @abstractmethod
    def parse(cls, fields: Sequence[str]) -> Self:
        """The mask of a name's fields after the kind; raises ValueError if they are invalid."""

    @classmethod
    @abstractmethod
    def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Self:
        """A mask of that word for those lengths, weighted towards edges."""

    @classmethod
    @abstractmethod
    def can_empty_rows(cls, word: str, *, square: bool) -> bool:
        """Whether a mask of that word can leave a row without a key, although there is a key.

        square: whether seqlen_q == seqlen_kv; if not, they differ.
        """

    @classmethod
    @abstractmethod
    def gallery(cls) -> tuple[Mask, ...]:
        """Examples for batch 1, 12 queries and 24 keys, with intersections of lower ranks too."""

    @abstractmethod
    def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """A mask that shows other keys in such a problem, of the same kind if there is one."""

    @abstractmethod
    def restrict(self, view: View) -> Iterator[Mask]:
        """Masks that can show a part of a problem, alone, the same pairs as this mask does.

        The best comes first.  The caller compares them with this mask: none has to be right.
        """

    @abstractmethod
    def doubled(self, *, rows: bool) -> Mask | None:
        """The mask for twice the keys, where key j becomes keys 2 j and 2 j + 1.

        rows: whether query i becomes queries 2 i and 2 i + 1; then only row 2 i + 1 has to see
        exactly both copies of the keys of row i.  It is true if `by_row` is true.
        None if there is no such mask.
        """

    def halved(self) -> Mask:
        """The mask for about half the queries and keys."""
        return self

    def extended(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """The mask for one more sequence, of those lengths."""
        return self


EVERYTHING = "full"  # the kind that hides nothing: an intersection of no masks
KINDS: dict[str, type[Atom]] = {}
"""The registered kinds by name, in the order of registration; `kinds` gives them by rank."""


def _check(cls: type[Atom]) -> None:
    """Raise TypeError if that class cannot be a kind of mask."""
    refuse_incomplete(
        cls, "mask kind", ("kind", "words", "varies"), "Atom in references/masks/base.py"
    )
    named = f"{cls.__name__}.kind {cls.kind!r}"
    if not re.fullmatch(r"[a-z]+", cls.kind):
        raise TypeError(f"mask kind: {named} is not of lower-case letters alone")
    if cls.kind in KINDS or cls.kind == "intersection":
        raise TypeError(f"mask kind: {named} is the name of another kind")
    bad = [word for word in cls.words if not re.fullmatch(rf"{cls.kind}(\.[a-z]+)?", word)]
    if bad or not _drawn(cls.words):
        legal = f"'{cls.kind}' or begin with '{cls.kind}.'"
        most = f"one at least must not be '{cls.kind}{SQUARE}'"
        raise TypeError(f"mask kind: {cls.__name__}.words {cls.words!r} must be {legal}; {most}")


def _drawn(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.endswith(SQUARE))


def kinds() -> tuple[type[Atom], ...]:
    """All kinds of masks, by rank."""
    return tuple(sorted(KINDS.values(), key=lambda kind: (kind.rank, kind.kind)))


def mask_words() -> tuple[str, ...]:
    """All words that a declaration can use for masks, in the order of kinds."""
    return tuple(word for kind in kinds() for word in kind.words)


def drawn_words() -> tuple[str, ...]:
    """The words that masks are drawn by: those that do not end in ".square"."""
    return _drawn(mask_words())


def kind_of(word: str) -> type[Atom]:
    """The kind of a word of `mask_words`; raises MaskNameError for another."""
    kind = KINDS.get(word.partition(".")[0])
    if kind is None or word not in kind.words:
        raise MaskNameError(f"not a kind of mask: {word!r} (kinds: {', '.join(mask_words())})")
    return kind


def gallery() -> tuple[Mask, ...]:
    """The examples of all kinds."""
    return tuple(mask for kind in kinds() for mask in kind.gallery())


# Intersections.


@dataclass(frozen=True)
class Intersection(Mask):
    """Pairs that every part shows.

    `intersect` and `&` build it: flattened, sorted, without repeats.
    """

    parts: tuple[Atom, ...]
    kind: ClassVar[str] = "intersection"

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return self.parts

    def check(self, batch: int) -> None:
        for part in self.parts:
            part.check(batch)

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        mods = [part.mod(seqlen_q, seqlen_kv, device) for part in self.parts]
        return lambda b, h, q, k: reduce(and_, (mod(b, h, q, k) for mod in mods))

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval | None:
        bounds = [part.interval(seqlen_q, seqlen_kv, b, q) for part in self.parts]
        if any(bound is None for bound in bounds):
            return None
        lows, highs = zip(*(bound for bound in bounds if bound is not None), strict=True)
        return reduce(torch.maximum, lows), reduce(torch.minimum, highs)


def intersect(*masks: Mask) -> Mask:
    """The intersection of masks, in a canonical order: equal sets of parts have one name."""
    parts = {part for mask in masks for part in mask.atoms if part.kind != EVERYTHING}
    if not parts:
        return KINDS[EVERYTHING]()
    ordered = tuple(sorted(parts, key=lambda part: (part.rank, part.kind, part.name)))
    return ordered[0] if len(ordered) == 1 else Intersection(ordered)


# Functions that several kinds share.


def offset(alignment: Alignment, seqlen_q: int, seqlen_kv: int) -> int:
    """The key on query 0's diagonal."""
    return seqlen_kv - seqlen_q if alignment == "br" else 0


def count(text: str) -> int:
    """A whole number >= 0 of a name; raises ValueError for any other text."""
    if not text.isdecimal():  # int() would read "1_0" and "+1"
        raise ValueError(text)
    return int(text)


def join(lengths: Sequence[int]) -> str:
    """Lengths as one field of a name."""
    return "_".join(map(str, lengths))


def split(text: str) -> tuple[int, ...]:
    """The lengths in a field that `join` wrote; raises ValueError for any other text."""
    return tuple(count(length) for length in text.split("_")) if text else ()


def expect_fields(fields: Sequence[str], *numbers: int) -> None:
    """Raise ValueError unless a name has one of those numbers of fields."""
    if len(fields) not in numbers:
        raise ValueError(f"{len(fields)} fields")
