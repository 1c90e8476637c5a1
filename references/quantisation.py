"""Quantisation: the factors of stored numbers, and their meaning.

Attention is that of q, k and v times their factors.  A quantisation is a frozen value named by one
word, which case ids (`descale=head`) and `Support.descalings` use.  A new one is a subclass of
`Quantisation` in a file that the package imports: Python registers a class with a `word` when it
creates it, and declarations, problems and buffers then know it.  No bound is derived for one that
breaks FACTORS_BY_ROW: a kernel that declares it is refused in one line.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from references.premises import EVERY_PREMISE, Premise
from references.tensor import Tensor

Shapes = Mapping[str, tuple[int, int, int, int]]


@dataclass(frozen=True)
class Quantisation(ABC):
    """Factors of q, k and v, in float32.

    word: its name, in lower-case letters and digits.
    scaled: whether q, k and v have factors.
    shared: whether one factor is stored for a whole tensor; a kernel sees it with strides of 0.
    keys: how many successive values share a factor; 0: all of a head.
    breaks: the premises that do not hold, at least PLAIN_INPUTS if there are factors; all by
    default.
    """

    word: ClassVar[str]
    scaled: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    keys: ClassVar[int] = 0
    breaks: ClassVar[frozenset[Premise]] = EVERY_PREMISE

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        if not hasattr(cls, "word"):
            return
        if not re.fullmatch(r"[a-z][a-z0-9]*", cls.word) or cls.word in KINDS:
            raise TypeError(f"quantisation: {cls.__name__}.word {cls.word!r} is taken or no word")
        if cls.scaled and Premise.PLAIN_INPUTS not in cls.breaks:
            raise TypeError(f"quantisation: {cls.__name__}.breaks lacks Premise.PLAIN_INPUTS")
        KINDS[cls.word] = cls

    @property
    def name(self) -> str:
        return self.word

    @property
    def label(self) -> str:
        """The quantisation in messages and tables."""
        return f"descales by {self.word}"

    @abstractmethod
    def factors(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """The shape of a tensor's factors, as a kernel sees it; shapes: of q, k and v."""

    @abstractmethod
    def spread(self, factors: Tensor, name: str, shapes: Shapes) -> Tensor:
        """The factors, shaped to broadcast with the tensor."""

    def buffers(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """The shape of every factor by the name of its buffer ("descale_q"), as a kernel sees
        it."""
        names = ("q", "k", "v") if self.scaled else ()
        return {f"descale_{name}": self.factors(name, shapes) for name in names}

    def stored(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """The stored shape of every factor by the name of its buffer; all sizes are 1 if it is
        shared."""
        seen = self.buffers(shapes).items()
        return {name: (1,) * len(shape) if self.shared else shape for name, shape in seen}

    def dequantise(
        self, name: str, values: Tensor, factors: Mapping[str, Tensor], shapes: Shapes
    ) -> Tensor:
        """A tensor times its factors, in fp64; unchanged if it has none.

        values: at their full shape.  factors: as stored, by the name of their buffer.
        """
        if not self.scaled:
            return values
        seen = factors[f"descale_{name}"].double().expand(self.factors(name, shapes))
        return values.double() * self.spread(seen, name, shapes)


KINDS: dict[str, type[Quantisation]] = {}
"""The registered quantisations by word, in the order of registration."""


def quantisation_words() -> tuple[str, ...]:
    """All words that `Support.descalings` can list, "none" first."""
    return tuple(KINDS)


def parse_quantisation(word: str) -> Quantisation:
    """The quantisation of that word; raises ValueError for another."""
    if word not in KINDS:
        raise ValueError(f"{word!r} is none of {', '.join(KINDS)}")
    return KINDS[word]()


@dataclass(frozen=True)
class _PerHead(Quantisation):
    """At most one factor for every sequence and key head."""

    breaks: ClassVar[frozenset[Premise]] = frozenset({Premise.PLAIN_INPUTS})

    def factors(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        return shapes["k"][:2]

    def spread(self, factors: Tensor, name: str, shapes: Shapes) -> Tensor:
        group = shapes[name][1] // shapes["k"][1]
        return factors.repeat_interleave(group, 1)[..., None, None]


@dataclass(frozen=True)
class Unquantised(_PerHead):
    """No factors: q, k and v are the stored numbers."""

    word: ClassVar[str] = "none"
    scaled: ClassVar[bool] = False
    breaks: ClassVar[frozenset[Premise]] = frozenset()


@dataclass(frozen=True)
class ByTensor(_PerHead):
    """One factor for each of q, k and v, which a kernel sees as (batch, heads_kv)."""

    word: ClassVar[str] = "tensor"
    shared: ClassVar[bool] = True


@dataclass(frozen=True)
class ByHead(_PerHead):
    """One factor per sequence and key head, (batch, heads_kv), as in FlashAttention-3: a query head
    uses the factor of its key head."""

    word: ClassVar[str] = "head"


@dataclass(frozen=True)
class ByBlock(Quantisation):
    """One factor for `queries` successive queries of a query head, and one for `keys` successive
    keys, and values, of a key head: (batch, heads, blocks), the last block perhaps shorter.

    A subclass is a quantisation with a word and two sizes, as in SageAttention: 128 and 64.
    """

    queries: ClassVar[int]
    breaks: ClassVar[frozenset[Premise]] = frozenset(
        {Premise.PLAIN_INPUTS, Premise.FACTORS_BY_HEAD}
    )

    def factors(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        batch, heads, rows, _ = shapes[name]
        return batch, heads, max(-(-rows // self._size(name)), 1)

    def spread(self, factors: Tensor, name: str, shapes: Shapes) -> Tensor:
        rows = shapes[name][2]
        return factors.repeat_interleave(self._size(name), 2)[:, :, :rows, None]

    def _size(self, name: str) -> int:
        return self.queries if name == "q" else self.keys


@dataclass(frozen=True)
class ByBlockOf64(ByBlock):
    """One factor for 64 queries, keys or values."""

    word: ClassVar[str] = "block64"
    queries: ClassVar[int] = 64
    keys: ClassVar[int] = 64


@dataclass(frozen=True)
class ByBlockOf128(ByBlock):
    """One factor for 128 queries, keys or values."""

    word: ClassVar[str] = "block128"
    queries: ClassVar[int] = 128
    keys: ClassVar[int] = 128
