"""The base class of score mods, and the registry of their kinds.

A kind is a subclass of `ScoreMod`.  Python runs the checks of `ScoreMod.__init_subclass__` when it
creates the class: an incomplete kind is refused there, in one line, and a complete one is
registered.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias

from references.kinds import refuse_incomplete
from references.premises import EVERY_PREMISE, Premise
from references.tensor import Tensor, torch

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Device: TypeAlias = "torch.device | str"


class ScoreModNameError(ValueError):
    """The name of a score mod does not parse, or a word names no kind."""


@dataclass(frozen=True)
class Extent:
    """The numbers of query heads, queries and keys of a whole problem."""

    heads: int
    seqlen_q: int
    seqlen_kv: int


@dataclass(frozen=True)
class Rounding:
    """Roundings of a kernel that computes f(s), all relative to one quantity.

    of: the quantity: the scaled "score" s before f, the "added" |f(s) - s|, or the "result" f(s).
    count: roundings of fp32.
    narrow: additional roundings to 16 bits in a kernel that keeps scores in such a format; None if
    they are not derived: such a kernel gets no bound.
    step: the factor that multiplies the smallest number of that format on its way to f(s), summed
    over the narrow roundings.
    function: an elementary function that is computed here, whose error a kernel declares: "tanh".
    """

    of: Literal["score", "added", "result"]
    count: int
    narrow: int | None = None
    step: float = 0.0
    function: str = ""


@dataclass(frozen=True)
class ScoreMod(ABC):
    """A function f of the scaled score s of a pair, and of the pair's position: softmax takes f(s).

    A subclass must define every method that is abstract here, and these attributes except the last
    two:
    word: its key in the name of a problem, and its word in `Support.score_mods`.
    steepest: an upper bound on |df / ds|.
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
        """The parameters in a name, after the word."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """The score mod of that text; raises ValueError if the text is invalid."""

    @classmethod
    @abstractmethod
    def gallery(cls) -> tuple[ScoreMod, ...]:
        """Examples, the simplest first: problems are drawn with one of these."""

    @abstractmethod
    def function(self, extent: Extent, device: Device = "cpu") -> ScoreFunction:
        """f for one shape, `f(s, b, h, q, k)` on broadcastable tensors: s in fp64, which it may
        overwrite, and the integers that `Mask.mod` takes.  For a NaN or infinite s, f(s) can be
        NaN, infinite or finite."""

    @abstractmethod
    def precise(self, mp: Any, extent: Extent, score: Any, at: tuple[int, int, int, int]) -> Any:
        """f(s) of one pair at (batch, head, query, key), an mpmath number like s.  mp: mpmath's
        mp."""

    @abstractmethod
    def slope(self, modified: Tensor) -> Tensor | None:
        """df / ds, computed from f(s) alone; None if it is 1 for every pair."""

    @abstractmethod
    def reach(self, extent: Extent, size: Tensor) -> Tensor:
        """The largest |f(s)| of any pair, for |s| <= size, any shape."""

    @abstractmethod
    def moved(self, size: Tensor, error: Tensor, modified: Tensor) -> Tensor:
        """The largest change of f(s) if s changes by at most `error`; size: |s|, modified: |f(s)|,
        both 0 for masked pairs.  It may overwrite `size` and `error`, and return either."""

    @abstractmethod
    def roundings(self, extent: Extent) -> tuple[Rounding, ...]:
        """The roundings of a kernel that computes f, enough for every correct way to compute it."""

    @property
    def noise(self) -> float:
        """The absolute error of the fp64 f(s) and of `moved`, beyond that of fp64 sums."""
        return 0.0

    def slope_error(
        self, slope: Tensor | None, error: Tensor, result: float, u: float
    ) -> Tensor | float:
        """A bound on the error of the computed slope, without its last rounding, if s is off by
        `error` at most; the largest of any pair if `slope` is None.

        result: the computed f(s) is f(s) times a factor in [1 / `result`, `result`]; u: fp32's unit
        roundoff.  It is called only if the method `slope` gives a tensor.
        """
        raise NotImplementedError(f"{type(self).__name__}.slope_error")

    def sibling(self) -> ScoreMod:
        """Another one of the same kind, if the gallery has one; else this one."""
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
