"""Random words and numbers of a problem, the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from verify.arithmetic.rounding import Floats
from verify.problem import Problem

Integers = NDArray[np.int64]
Shape4 = tuple[int, int, int, int]
_SQRT_HALF = 0.7071067811865476  # the geometric middle between two powers of two


@dataclass(frozen=True)
class Source:
    """What a distribution draws from: the problem, the shapes to fill and independent streams of
    random words."""

    problem: Problem

    def shape(self, name: str) -> Shape4:
        """Stored shape of "q", "k", "v" or "out": the logical one, with 1 for each dimension that
        its layout expands."""
        batch, heads, seqlen, dim = getattr(self.problem, f"shape_{name}")
        expand = self.problem.layouts[name].expand
        return 1 if "b" in expand else batch, 1 if "h" in expand else heads, seqlen, dim

    def raw(self, name: str, purpose: str, count: int) -> NDArray[np.uint64]:
        """`count` 64-bit words of the stream (seed, name, purpose)."""
        text = f"attention-verify/{self.problem.seed}/{name}/{purpose}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
        words = np.random.Philox(key=key, counter=0).random_raw(count)
        return np.asarray(words, dtype=np.uint64)

    def words(
        self, name: str, purpose: str, shape: tuple[int, ...] | None = None
    ) -> NDArray[np.uint16]:
        """16-bit words, of the stored shape of that tensor unless another is given."""
        shape = self.shape(name) if shape is None else shape
        count = math.prod(shape)
        raw = self.raw(name, purpose, -(-count // 4)).astype("<u8", copy=False).view("<u2")
        return raw[:count].reshape(shape)

    def normal(
        self, name: str, purpose: str = "normal", shape: tuple[int, ...] | None = None
    ) -> Floats:
        """N(0, 1) on 65536 quantiles: multiples of 2^-20 with 2^-17 < |x| < 4.4."""
        return _normal_quantiles()[self.words(name, purpose, shape)]

    def integers(
        self, name: str, purpose: str, low: int, high: int, shape: tuple[int, ...] | None = None
    ) -> Integers:
        """Integers in [low, high), high - low a power of two."""
        return (self.words(name, purpose, shape) & (high - low - 1)).astype(np.int64) + low

    def rows(self, low: int, high: int) -> Floats:
        """One integer in [low, high) per query row, (batch, heads_q, seqlen_q, 1) as stored."""
        return self.integers("q", "rows", low, high, (*self.shape("q")[:3], 1)).astype(np.float64)

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
        return math.ldexp(1.0, of_q), math.ldexp(exact if 0.25 <= exact <= 2 else 1.0, of_k)


@cache
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
