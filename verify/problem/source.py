"""Random words and numbers of a problem, the same bits on every machine and device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import Floats, cast
from verify.problem import Problem, philox

Shape4 = tuple[int, int, int, int]
_SQRT_HALF = 0.7071067811865476  # the geometric middle between two powers of two
_FINITE = 1.5  # times an eighth of a format's range, times the largest of `normal`, 4.4: within it
_CPU = torch.device("cpu")
_WORDS = 1 << 16  # different 16-bit words


@dataclass(frozen=True, eq=False)
class Table:
    """A number for each 16-bit word.

    make: gives 65536 float64 values on the CPU; called once, at the first use.
    """

    make: Callable[[], Tensor]
    _kept: dict[object, Tensor] = field(default_factory=dict)

    def values(self, device: torch.device) -> Tensor:
        """The numbers, float64."""
        return self._on(device, "values", self.make)

    def rounded(self, dtype: DType, device: torch.device) -> Tensor:
        """The numbers in `dtype`, as `stored` rounds them."""
        return self._on(device, dtype.name, lambda: stored(self.values(_CPU), dtype))

    def _on(self, device: torch.device, what: str, make: Callable[[], Tensor]) -> Tensor:
        key = device, what
        if key not in self._kept:
            self._kept[key] = make().to(device)
        return self._kept[key]


@dataclass(eq=False)
class Words:
    """16-bit words of a stream, drawn when they are first read, with all that `waiting` holds.

    key: of the stream.  waiting: the words of a case that are not drawn yet, these among them.
    """

    key: int
    shape: tuple[int, ...]
    device: torch.device
    waiting: list[Words]
    _drawn: Tensor | None = None

    def __post_init__(self) -> None:
        self.waiting.append(self)

    @property
    def tensor(self) -> Tensor:
        """int32 in [0, 65536), of that shape."""
        if self._drawn is None:
            asked = [(each.key, math.prod(each.shape)) for each in self.waiting]
            cpu = self.device.type == "cpu"
            drawn = numpy_words(asked) if cpu else torch_words(asked, self.device)
            for each, words in zip(self.waiting, drawn, strict=True):
                each._drawn = words.view(each.shape)
            self.waiting.clear()
        assert self._drawn is not None
        return self._drawn


@dataclass(frozen=True)
class Picked:
    """Numbers of a table, one for each word: rounded without a detour through float64.

    drawn: the words, int32 in [0, 65536).  factor: of all numbers.
    """

    table: Table
    drawn: Words | Tensor
    factor: float = 1.0

    @property
    def words(self) -> Tensor:
        """The words, int32 in [0, 65536)."""
        return self.drawn.tensor if isinstance(self.drawn, Words) else self.drawn

    @property
    def values(self) -> Tensor:
        """The numbers in float64."""
        found = self._of(self.table.values(self.words.device))
        return found if self.factor == 1.0 else found * self.factor

    def stored(self, dtype: DType) -> Tensor:
        """What `stored` makes of the values, the same bits."""
        device = self.words.device
        if self.factor == 1.0:
            return self._of(self.table.rounded(dtype, device))
        if self.words.numel() < _WORDS:
            return stored(self.values, dtype)
        return self._of(stored(self.table.values(device) * self.factor, dtype))

    def _of(self, table: Tensor) -> Tensor:
        # By integers: index_select knows few formats.
        found = bits(table).index_select(0, self.words.flatten())
        return found.view(table.dtype).view(self.words.shape)


def bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as signed integers of their size."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored(values: Tensor | Picked, dtype: DType) -> Tensor:
    """Values as a tensor holds them: rounded; for a format without infinity saturated, as a
    quantiser lets them.  Contiguous, on the device of the values.

    values: float64; what is in `dtype` already stays.
    """
    if isinstance(values, Picked):
        return values.stored(dtype)
    if values.dtype == dtype.torch != torch.float64:
        return values
    # What is expanded is rounded once.
    steps = zip(values.stride(), values.shape, strict=True)
    once = tuple(slice(1) if not step and size else slice(None) for step, size in steps)
    kept = values[once]
    if not dtype.has_infinity:
        kept = kept.clamp(-dtype.max, dtype.max)
    rounded = cast(kept, dtype)
    if rounded.shape == values.shape:
        return rounded
    return rounded.expand(values.shape).clone(memory_format=torch.contiguous_format)


_PHILOX = np.random.Philox(key=0, counter=0)
_START = _PHILOX.state


def _raw(key: int, count: int) -> NDArray[np.uint64]:
    # To make a generator takes eight times as long as to set one.
    state = _START["state"] | {"key": np.frombuffer(key.to_bytes(16, "little"), "<u8")}
    with _PHILOX.lock:
        _PHILOX.state = _START | {"state": state}
        words = _PHILOX.random_raw(count)
    return np.asarray(words, dtype=np.uint64)


def cpu_words(key: int, count: int) -> Tensor:
    """The first 16-bit words of a key, int32: each word of Philox is four, the lowest first."""
    raw = _raw(key, -(-count // 4)).astype("<u8", copy=False).view("<u2")
    return torch.from_numpy(raw[:count].astype(np.int32))


def numpy_words(asked: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Those words of each (key, count), on the CPU."""
    return [cpu_words(key, count) for key, count in asked]


def torch_words(asked: Sequence[tuple[int, int]], device: torch.device) -> list[Tensor]:
    """The same words, made on a device, all at once."""
    raw = philox.words([(key, -(-count // 4)) for key, count in asked], device)
    pairs = zip(raw, asked, strict=True)
    return [
        words.view(torch.int16)[:count].int().bitwise_and_(65535) for words, (_, count) in pairs
    ]


@dataclass(frozen=True)
class Source:
    """What a distribution draws from: the problem, the shapes to fill and independent streams of
    random words.

    device: where the tensors are made; their bits are the same on each.
    """

    problem: Problem
    device: torch.device = _CPU
    _waiting: list[Words] = field(default_factory=list)

    def shape(self, name: str) -> Shape4:
        """Stored shape of "q", "k", "v" or "out": the logical one, with 1 for each dimension that
        its layout expands."""
        batch, heads, seqlen, dim = getattr(self.problem, f"shape_{name}")
        expand = self.problem.layouts[name].expand
        return 1 if "b" in expand else batch, 1 if "h" in expand else heads, seqlen, dim

    def raw(self, name: str, purpose: str, count: int) -> NDArray[np.uint64]:
        """`count` 64-bit words of the stream (seed, name, purpose), for what the CPU decides."""
        return _raw(self._key(name, purpose), count)

    def _key(self, name: str, purpose: str) -> int:
        text = f"attention-verify/{self.problem.seed}/{name}/{purpose}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")

    def words(self, name: str, purpose: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """16-bit words as int32, of the stored shape of that tensor unless another is given."""
        return self._words(name, purpose, shape).tensor

    def _words(self, name: str, purpose: str, shape: tuple[int, ...] | None) -> Words:
        shape = self.shape(name) if shape is None else shape
        return Words(self._key(name, purpose), shape, self.device, self._waiting)

    def picks(self, purpose: str, count: int) -> list[int]:
        """16-bit words of the stream (seed, "all", purpose), for what the CPU decides."""
        return cpu_words(self._key("all", purpose), count).tolist()

    def picked(
        self, name: str, purpose: str, table: Table, shape: tuple[int, ...] | None = None
    ) -> Picked:
        """Numbers of a table, one for each word of `words`."""
        return Picked(table, self._words(name, purpose, shape))

    def normal(
        self, name: str, purpose: str = "normal", shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """N(0, 1) on 65536 quantiles, float64: multiples of 2^-20 with 2^-17 < |x| < 4.4."""
        return self.picked(name, purpose, NORMAL, shape).values

    def integers(
        self, name: str, purpose: str, low: int, high: int, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Integers in [low, high), int64; high - low is a power of two."""
        words = self.words(name, purpose, shape).bitwise_and_(high - low - 1)
        return words.long().add_(low)

    def rows(self, low: int, high: int) -> Tensor:
        """One integer in [low, high) per query row, int64 (batch, heads_q, seqlen_q, 1) as
        stored."""
        return self.integers("q", "rows", low, high, (*self.shape("q")[:3], 1))

    def stored(self, values: Tensor | Picked | float) -> Tensor:
        """Values, or one number, rounded to the problem's dtype."""
        given = self.floats(values) if isinstance(values, float) else values
        return stored(given, self.problem.format)

    def where(
        self, chosen: Tensor, one: Tensor | Picked | float, other: Tensor | Picked | float
    ) -> Tensor:
        """`one` where chosen, `other` elsewhere, in the problem's dtype."""
        found = torch.where(chosen, bits(self.stored(one)), bits(self.stored(other)))
        return found.view(self.problem.format.torch)

    def arange(self, count: int) -> Tensor:
        """0, 1, ... count - 1, int64."""
        return torch.arange(count, device=self.device)

    def floats(self, values: object) -> Tensor:
        """Numbers that the CPU knows, float64."""
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def ones(self, name: str) -> Tensor:
        """1 for each stored element of that tensor, float64, expanded."""
        return self.floats(1.0).expand(self.shape(name))

    @property
    def sign(self) -> float:
        """Sign of the scale: what turns a score that should be positive into a positive logit."""
        return -1.0 if self.problem.scale < 0 else 1.0

    def power(self, target: float, headroom: int = 3) -> float:
        """The power of two nearest to `target` that is normal in the dtype and stays finite when
        multiplied by 2**headroom.

        At most 2**56: the product of two such numbers, summed over head_dim, is finite in float32.
        """
        largest = min(math.frexp(self.problem.format.max)[1] - 1 - headroom, 56)
        if not math.isfinite(target):
            return math.ldexp(1.0, largest)
        fraction, exponent = math.frexp(target)
        nearest = exponent if fraction >= _SQRT_HALF else exponent - 1
        return math.ldexp(1.0, max(min(nearest, largest), self.problem.format.emin))

    def per_score(self, logit: float, norm: float) -> float:
        """What q * k must be for a logit of that size: logit / (|scale| norm); infinite if the
        scale is 0."""
        denominator = abs(self.problem.scale) * norm
        return logit / denominator if denominator > 0 else math.inf

    def split(self, product: float) -> tuple[float, float]:
        """Two powers of two whose product is near `product`, or as near as the dtype can."""
        if not math.isfinite(product):
            return self.power(product), self.power(product)
        half = self.power(math.ldexp(1.0, math.frexp(product)[1] // 2))
        return half, self.power(product / half)

    def scores(self, logit: float, skew: int) -> tuple[float, float]:
        """Sizes of a constant row of Q and a constant key whose logit is that large, or as near as
        the dtype's range lets it be.

        skew: the binary exponents by which the row is larger than the key, about.
        """
        product = self.per_score(logit, self.problem.head_dim)
        largest = math.frexp(self.problem.format.max)[1] - 3
        exponent = math.frexp(product)[1] if math.isfinite(product) else 2 * largest
        of_q = max(min((exponent + skew) // 2, largest), self.problem.format.emin)
        of_k = max(min(exponent - of_q, largest), self.problem.format.emin)
        exact = math.ldexp(product, -of_q - of_k) if math.isfinite(product) else 1.0
        return math.ldexp(1.0, of_q), math.ldexp(exact if 0.25 <= exact <= _FINITE else 1.0, of_k)


def _normal_quantiles() -> Floats:
    """Quantiles of N(0, 1) at (i + 1/2) / 65536, rounded to 2^-20; by midpoint integration of the
    density."""
    step = 2.0**-10
    x = (np.arange(int(4.5 / step)) + 0.5) * step
    t = x * x * 0.5 / 256.0
    exp = np.ones_like(t)
    for divisor in range(7, 0, -1):  # Taylor series of exp(-t), t < 0.04, by Horner's rule
        exp = 1.0 - exp * t / divisor
    for _ in range(8):  # exp(-256 t)
        exp = exp * exp
    density = exp * 0.3989422804014327  # 1 / sqrt(2 pi)
    # cumsum adds strictly from left to right
    below = np.concatenate([[0.0], np.cumsum(density * step)])
    probability = (np.arange(32768) + 0.5) / 65536.0
    cell = np.searchsorted(below, probability, side="right") - 1
    inside = (probability - below[cell]) / (below[cell + 1] - below[cell])
    positive = np.rint((cell + inside) * step * 2.0**20) * 2.0**-20
    return np.concatenate([-positive[::-1], positive])


NORMAL = Table(lambda: torch.from_numpy(_normal_quantiles()))
FIVE_INTEGERS = Table(lambda: torch.arange(65536).remainder(5).sub(2).double())  # in [-2, 2]


def _integers(low: int, high: int) -> Tensor:
    return (torch.arange(65536) & (high - low - 1)).double() + low


@cache
def integer_table(low: int, high: int) -> Table:
    """Integers in [low, high), as `Source.integers` gives them."""
    return Table(lambda: _integers(low, high))
