"""What a score mod is, what each kind of score mod says of itself, and the registry of kinds.

A kind is a subclass of `ScoreMod`.  Python runs the checks of `ScoreMod.__init_subclass__` when the
class is made: a kind that lacks something is refused there, in one line, and a complete one is
registered.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from references.kinds import refuse_incomplete
from references.premises import EVERY_PREMISE, Premise

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Device = torch.device | str


class ScoreModNameError(ValueError):
    """The name of a score mod that does not parse, or a word that names no kind."""


@dataclass(frozen=True)
class Extent:
    """A whole problem's query heads, queries and keys: what positions are counted in."""

    heads: int
    seqlen_q: int
    seqlen_kv: int


@dataclass(frozen=True)
class Rounding:
    """Roundings of a kernel that computes f(s), all relative to one quantity.

    of: the scaled "score" s on its way into f, what f has "added" to it, |f(s) - s|, or the
    "result", f(s).
    count: roundings of fp32.
    narrow: those besides in a kernel that keeps scores in 16 bits, to that format; None where they
    are not derived, so that such a kernel is given no bound.
    step: what the smallest number of that format is multiplied by on its way to f(s), summed over
    the narrow roundings.
    function: the elementary function that is computed there, whose error a kernel declares: "tanh".
    """

    of: Literal["score", "added", "result"]
    count: int
    narrow: int | None = None
    step: float = 0.0
    function: str = ""


@dataclass(frozen=True)
class ScoreMod(ABC):
    """A function f of the scaled score s of a pair, and of the pair's position: softmax takes f(s).

    A subclass must define every method that is abstract here, and these attributes but the last
    two:
    word: its key in the name of a problem, and what `Support.score_mods` can say of it.
    steepest: no |df / ds| is larger.
    breaks: the premises that do not hold with it (references/premises.py).
    divisor: a positive number by which a kernel divides the score, in one factor with
    softmax_scale; 0 for none.
    """

    word: ClassVar[str]
    steepest: ClassVar[float]
    breaks: ClassVar[frozenset[Premise]] = EVERY_PREMISE

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        _check(cls)
        KINDS[cls.word] = cls

    @property
    def label(self) -> str:
        """The score mod in messages and tables."""
        return self.word

    @property
    def name(self) -> str:
        """One line, without blanks, commas or shell characters, that `parse_score_mod` reads."""
        return f"{self.word}={self.text}"

    @property
    def divisor(self) -> float:
        return 0.0

    @property
    @abstractmethod
    def text(self) -> str:
        """The parameters: what follows the word in a name."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """The score mod of that text; raises ValueError if it is none."""

    @classmethod
    @abstractmethod
    def gallery(cls) -> tuple[ScoreMod, ...]:
        """Examples, the simplest first: problems are drawn with one of these."""

    @abstractmethod
    def function(self, extent: Extent, device: Device = "cpu") -> ScoreFunction:
        """f for one shape, `f(s, b, h, q, k)` on broadcastable tensors: s in fp64, which it may
        overwrite, and the integers that `Mask.mod` takes.  Where s is NaN or infinite, so is f(s),
        or it is finite."""

    @abstractmethod
    def precise(self, mp: Any, extent: Extent, score: Any, at: tuple[int, int, int, int]) -> Any:
        """f(s) of one pair at (batch, head, query, key), an mpmath number as s is. mp: mpmath's."""

    @abstractmethod
    def slope(self, modified: Tensor) -> Tensor | None:
        """df / ds, from f(s) alone; None where it is 1 for every pair."""

    @abstractmethod
    def reach(self, extent: Extent, size: Tensor) -> Tensor:
        """The largest |f(s)| of any pair, for |s| <= size, any shape."""

    @abstractmethod
    def moved(self, size: Tensor, error: Tensor, modified: Tensor) -> Tensor:
        """How far f(s) moves where s does by `error` at most; size: |s|, modified: |f(s)|, both 0
        for masked pairs.  It may overwrite `size` and `error`, and return either."""

    @abstractmethod
    def roundings(self, extent: Extent) -> tuple[Rounding, ...]:
        """What a kernel rounds on the way, all kernels included that compute f in an honest way."""

    @property
    def noise(self) -> float:
        """What the fp64 f(s) and `moved` may be off by, absolutely, more than fp64 sums are."""
        return 0.0

    def slope_error(
        self, slope: Tensor | None, error: Tensor, result: float, u: float
    ) -> Tensor | float:
        """How far the slope as computed may be off, its last rounding left out, where s is off by
        `error` at most; the largest of any pair where `slope` is None.

        result: f(s) as computed is f(s) times 1 to `result`, or one over that; u: fp32's unit
        roundoff.  Only asked where `slope` gives a tensor.
        """
        raise NotImplementedError(f"{type(self).__name__}.slope_error")

    def sibling(self) -> ScoreMod:
        """Another of the same kind, if the gallery has one."""
        return next((mod for mod in self.gallery() if mod != self), self)


KINDS: dict[str, type[ScoreMod]] = {}
"""The registered kinds by word, in the order of registration."""


def _check(cls: type[ScoreMod]) -> None:
    """Raise TypeError if that class cannot be a kind of score mod."""
    refuse_incomplete(
        cls, "score mod", ("word", "steepest"), "ScoreMod in references/score_mods/base.py"
    )
    named = f"{cls.__name__}.word {cls.word!r}"
    if not re.fullmatch(r"[a-z][a-z_]*", cls.word):
        raise TypeError(f"score mod: {named} is not of lower-case letters and _ alone")
    if cls.word in KINDS:
        raise TypeError(f"score mod: {named} is the word of another kind")


def mod_words() -> tuple[str, ...]:
    """The words of all kinds of score mods, in alphabetical order."""
    return tuple(sorted(KINDS))


def mod_kind_of(word: str) -> type[ScoreMod]:
    """The kind of that word; raises ScoreModNameError for another."""
    if word not in KINDS:
        known = ", ".join(mod_words())
        raise ScoreModNameError(f"not a kind of score mod: {word!r} (kinds: {known})")
    return KINDS[word]


def parse_score_mod(name: str) -> ScoreMod:
    """The score mod of that name; raises ScoreModNameError with what does not parse."""
    word, _, text = name.partition("=")
    try:
        return mod_kind_of(word).parse(text)
    except ScoreModNameError:
        raise
    except ValueError as error:
        raise ScoreModNameError(f"not a score mod: {name!r} ({error})") from None
