"""Named distributions of input values, the same bits on every machine.

Random words come from the counter-based generator Philox-4x64 (Salmon, Moraes, Dror, Shaw:
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), one key per (seed, tensor, purpose).  Words
become values by integer arithmetic, table look-ups and elementwise IEEE double operations (+, -, *,
/) only: no libm, no sums whose order a library chooses, no float matmul.

To add a distribution, write one function under `@distribution`; its name, underscores included, is
the distribution's name and the first line of its docstring says which bugs it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verify.arithmetic.rounding import Floats
from verify.problem.source import Integers, Source

Values = tuple[Floats, Floats, Floats]  # q, k, v


Fill = Callable[[Source], Values]


@dataclass(frozen=True)
class Distribution:
    """A registered distribution.  oracle: built for one oracle, which knows the answer; ordinary
    strategies leave it out. integer_dout: the upstream gradient holds small integers, so that
    products with it are exact."""

    name: str
    fill: Fill
    purpose: str
    oracle: bool = False
    integer_dout: bool = False


DISTRIBUTIONS: dict[str, Distribution] = {}


def distribution(*, oracle: bool = False, integer_dout: bool = False) -> Callable[[Fill], Fill]:
    """Register a function from a `Source` to the stored values of q, k and v under its own name."""

    def register(fill: Fill) -> Fill:
        name = fill.__name__
        if name in DISTRIBUTIONS:
            raise ValueError(f"distribution: {name!r} is registered twice")
        purpose = (fill.__doc__ or "").strip().partition("\n")[0]
        DISTRIBUTIONS[name] = Distribution(name, fill, purpose, oracle, integer_dout)
        return fill

    return register


def ordinary() -> tuple[str, ...]:
    """Names of the distributions that suit every problem, the simplest first."""
    return tuple(name for name, found in DISTRIBUTIONS.items() if not found.oracle)


@distribution()
def normal(source: Source) -> Values:
    """N(0, 1) everywhere: the base line, what most suites test alone."""
    return source.normal("q"), source.normal("k"), source.normal("v")


@distribution(integer_dout=True)
def small_integers(source: Source) -> Values:
    """Integers in [-2, 2], 80 % zeros: Q K^T is exact in any order, so any difference in LSE is a
    wrong index."""
    words = np.arange(65536)
    table = np.where(words * 5 < 65536 * 4, 0.0, np.array([-2.0, -1.0, 1.0, 2.0])[words & 3])
    q, k, v = (table[source.words(name, "sparse")] for name in "qkv")
    return q, k, v


@distribution()
def outliers(source: Source) -> Values:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), FlashAttention-3's accuracy test: rare large elements
    among small ones."""

    def mixed(name: str) -> Floats:
        rare = source.words(name, "rare") < 66  # 66 / 65536 is 0.001007
        return source.normal(name) + 10.0 * source.normal(name, "outlier") * rare

    return mixed("q"), mixed("k"), mixed("v")


@distribution()
def large_logits(source: Source) -> Values:
    """Logits of about 1e4, both signs: overflow of scores, low precision sums or prescaling, exp of
    a wrong maximum."""
    product = source.per_score(1e4, math.sqrt(source.problem.head_dim))
    factor_q, factor_k = source.split(product)
    return source.normal("q") * factor_q, source.normal("k") * factor_k, source.normal("v")


def _below(source: Source, logits: Floats) -> Values:
    """Every logit near -logits (one number per row), none positive: q of one sign, k of the other,
    1/8 of jitter in each."""
    typical = source.per_score(float(logits.max(initial=1.0)), source.problem.head_dim)
    _, factor_k = source.split(typical)
    most = source.power(math.inf, headroom=2)
    row = np.array(
        [min(source.per_score(x, source.problem.head_dim) / factor_k, most) for x in logits]
    )[:, None]

    def jitter(name: str) -> Floats:
        return 1.0 + source.integers(name, "jitter", -8, 8) / 64.0

    return -source.sign * row * jitter("q"), factor_k * jitter("k"), source.normal("v")


@distribution()
def negative_lse(source: Source) -> Values:
    """All logits negative, LSE about -1000 and in every eighth row -100: exp(0 - LSE) of padding,
    maxima that start at 0."""
    rows = np.arange(source.problem.seqlen_q) + source.problem.seed % 8
    return _below(source, np.where(rows % 8 == 0, 100.0, 1000.0))


@distribution()
def below_sentinel(source: Source) -> Values:
    """All logits near -131072: finite stand-ins for -inf (-1e4, -5e4) that valid scores fall
    below."""
    return _below(source, np.full(source.problem.seqlen_q, 131072.0))


@distribution()
def equal_rows(source: Source) -> Values:
    """All keys of a head identical: uniform weights, so a key lost, doubled or masked too much
    shows in the normaliser."""
    batch, heads, seqlen, dim = source.shape("k")
    return (
        source.normal("q"),
        np.repeat(source.normal("k", shape=(batch, heads, 1, dim)), seqlen, axis=2),
        source.normal("v"),
    )


@distribution()
def tied_maxima(source: Source) -> Values:
    """Each key occurs four times or more, far apart, and V < 0: exact ties of the row maximum,
    accumulators clamped at 0."""
    batch, heads, seqlen, dim = source.shape("k")
    different = max(seqlen // 4, 1)
    keys = source.normal("k", shape=(batch, heads, different, dim))
    return (
        source.normal("q"),
        keys[:, :, np.arange(seqlen) % different],
        -np.abs(source.normal("v")) - 0.0625,
    )


def _ramp(source: Source, position: Integers) -> Values:
    """Logits that grow by 1/4 to 7/8 per position in every row: score = a_i (position - seqlen_kv
    // 2), exactly.

    Summed over d, floor((x + d) / head_dim) is x (Hermite's identity); noise is added to one of two
    neighbouring elements of k and taken from the other, and q is constant along head_dim.
    """
    batch, heads, seqlen, dim = source.shape("k")
    centred = position - seqlen // 2
    k = np.broadcast_to(
        (centred[:, None] + np.arange(dim)) // dim, (batch, heads, seqlen, dim)
    ).copy()
    noise = source.integers("k", "noise", -4, 4, (batch, heads, seqlen, dim // 2))
    k[..., 0 : dim // 2 * 2 : 2] += noise
    k[..., 1 : dim // 2 * 2 : 2] -= noise
    scale = abs(source.problem.scale)
    # |scale| step is in [1/4, 1/2)
    step = source.power(math.ldexp(1.0, -1 - math.frexp(scale)[1]) if scale else 1.0)
    row = source.sign * step * (1.0 + source.rows(0, 4) / 4.0)
    return np.broadcast_to(row, source.shape("q")).copy(), k.astype(np.float64), source.normal("v")


@distribution()
def increasing(source: Source) -> Values:
    """Logits grow with the key index: every block brings a new maximum and a rescale, which lazy
    schemes must not skip."""
    return _ramp(source, np.arange(source.problem.seqlen_kv))


@distribution()
def decreasing(source: Source) -> Values:
    """Logits shrink with the key index: no rescale after the first block, later blocks underflow
    against it."""
    return _ramp(source, np.arange(source.problem.seqlen_kv)[::-1])


@distribution()
def sink(source: Source) -> Values:
    """One key outweighs all others by e^20 or more (attention sink), the first or any: a maximum
    lost between warps."""
    batch, heads, seqlen, dim = source.shape("k")
    k = source.normal("k")
    if seqlen:
        words = source.integers("k", "sink", 0, 65536, (batch, heads))
        where = np.where(words & 1, (words >> 1) % seqlen, 0)
        k[np.arange(batch)[:, None], np.arange(heads), where] = source.sign * source.power(
            source.per_score(48.0, dim)
        )
    return 0.5 + 0.5 * np.abs(source.normal("q")), k, source.normal("v")


@distribution()
def same_sign_v(source: Source) -> Values:
    """V > 0: the linear bias of truncating accumulators, which mean-zero values hide."""
    return source.normal("q"), source.normal("k"), np.abs(source.normal("v"))


@distribution()
def v_mean(source: Source) -> Values:
    """V = N(0, 1) plus a mean of 1 to 64 per column: a normaliser that does not match the weights,
    outputs off by a factor."""
    batch, heads, _, dim = source.shape("v")
    return (
        source.normal("q"),
        source.normal("k"),
        source.normal("v") + source.integers("v", "mean", 1, 65, (batch, heads, 1, dim)),
    )


@distribution()
def ones_v(source: Source) -> Values:
    """V = 1, so O = 1: row sums of other weights than those that multiply V."""
    return source.normal("q"), source.normal("k"), np.ones(source.shape("v"))


@distribution()
def one_hot_v(source: Source) -> Values:
    """V[j, c] = 1 where j = c (mod head_dim_v): O shows the weights themselves, so permuted keys or
    columns of V show."""
    _, _, seqlen, dim = source.shape("v")
    hot = np.arange(seqlen)[:, None] % dim == np.arange(dim)
    return (
        source.normal("q"),
        source.normal("k"),
        np.broadcast_to(hot, source.shape("v")).astype(np.float64),
    )


@distribution()
def zero_v_columns(source: Source) -> Values:
    """Every fourth column of V is 0, so that O is exactly 0 there: leaks between columns, unwritten
    output."""
    return (
        source.normal("q"),
        source.normal("k"),
        source.normal("v") * (np.arange(source.problem.head_dim_v) % 4 != 0),
    )


@distribution()
def low_rank(source: Source) -> Values:
    """Rank 2 to 4 with a few strong channels, like real activations: correlations that Gaussian
    inputs do not have."""
    rank = 2 + int(source.integers("all", "rank", 0, 65536, (1,))[0]) % 3

    def product(name: str, basis: Integers) -> Floats:
        batch, heads, seqlen, _ = source.shape(name)
        coefficients = source.integers(name, "coefficients", -8, 8, (batch, heads, seqlen, rank))
        exact = np.zeros((*coefficients.shape[:3], basis.shape[1]), dtype=np.int64)
        for r in range(rank):
            exact += coefficients[..., r, None] * basis[r]
        return exact.astype(np.float64) / 32.0

    strength = np.where(np.arange(source.problem.head_dim) % 16 == 5, 4, 1)
    shared = source.integers("all", "basis", -8, 8, (rank, source.problem.head_dim)) * strength
    basis_v = source.integers("v", "basis", -8, 8, (rank, source.problem.head_dim_v))
    return product("q", shared), product("k", shared), product("v", basis_v)


@distribution()
def subnormals(source: Source) -> Values:
    """Half of the elements subnormal in the dtype: flushing to zero, conversions that drop small
    numbers.

    Where float32 holds the dtype's subnormals as normal numbers (float16, float8), every fourth
    feature multiplies subnormals of k by q near 1 / (smallest normal), and every fourth column of V
    is subnormal throughout, so that flushing changes logits and outputs.  With the exponent range
    of float32 even correct kernels may flush in float32 arithmetic.
    """
    fmt = source.problem.format
    visible = fmt.emin > -126
    fraction_bits = fmt.precision - 1

    def small(name: str) -> Floats:
        words = source.words(name, "subnormal").astype(np.int64)
        fraction = (
            words >> (16 - fraction_bits) if fraction_bits < 16 else words << (fraction_bits - 16)
        )
        signed: Floats = (np.where(words & 1, -1, 1) * np.maximum(fraction, 1)).astype(np.float64)
        return signed * fmt.smallest_subnormal

    def mixed(name: str) -> Floats:
        always = visible & (name != "q") & (np.arange(source.shape(name)[3]) % 4 == 0)
        chosen = (source.words(name, "which") & 1).astype(bool) | always
        return np.where(chosen, small(name), source.normal(name))

    boost = np.where(
        visible & (np.arange(source.problem.head_dim) % 4 == 0), math.ldexp(1.0, -fmt.emin - 1), 1.0
    )
    return np.where(boost > 1, source.normal("q") * boost, mixed("q")), mixed("k"), mixed("v")


# Ordinary logits; those whose rounded product with log2(e) is off by 8, 16, 32, 64 or 256; fp32's
# largest number, which base 2 passes first; sums that overflow unless the scale is small.
_EDGES = (
    *(1.0, 1.0, 2.0**10),
    *(2.0**27, 2.0**28, 1.5 * 2.0**28, 2.0**29, 2.0**31, 2.0**60, 2.0**100),
    *(2.0**126, 2.4e38, 3.2e38, 1e40),
)


@distribution()
def range_edges(source: Source) -> Values:
    """Logits at the edges of fp32's range, whatever the scale: fused exponents that overflow,
    flushed products, infinity times 0.

    One size per problem, divided by up to 8 from row to row: of both signs, of one sign, with equal
    keys, or at random.  Every fourth column of V is 0, which a weight of infinity makes NaN.
    """
    picks = [int(word) for word in source.integers("all", "edge", 0, 65536, (3,))]
    of_q, of_k = source.scores(_EDGES[picks[0] % len(_EDGES)], (0, 24, -24)[picks[1] % 3])
    kind = picks[2] % 5
    q, k = (np.ones(source.shape(name)) for name in "qk")
    if kind == 0:
        q, k = source.normal("q"), source.normal("k")
    elif kind == 1:  # keys of either sign
        k = k * np.where(source.integers("k", "side", 0, 2, (*source.shape("k")[:3], 1)), 1.0, -1.0)
    elif kind == 2:  # none is equal to another one
        k = k * (1.0 + source.integers("k", "jitter", -8, 8) / 64.0)
    sign = source.sign * (-1.0 if kind == 3 else 1.0)
    v = source.normal("v") * (np.arange(source.problem.head_dim_v) % 4 != 0)
    row = np.array([1.0, 0.5, 0.25, 0.125])[source.rows(0, 4).astype(np.int64)]
    return q * (sign * of_q * row), k * of_k, v
