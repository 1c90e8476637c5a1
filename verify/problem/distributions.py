"""Named distributions of input values, the same bits on every machine.

Random words come from the counter-based generator Philox-4x64 (Salmon, Moraes, Dror, Shaw:
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), one key per (seed, tensor, purpose).  Words
become values by integer arithmetic, table look-ups and elementwise IEEE double operations (+, -, *,
/) only: no libm, no sums whose order a library chooses, no float matmul.  torch does these on any
device, with the same bits.  A product and a sum are two operations, since one that fuses them
rounds once.

To add a distribution, write one function under `@distribution`; its name, underscores included, is
the distribution's name and the first line of its docstring says which bugs it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.problem.source import NORMAL, Picked, Source, Table, bits, integer_table

# q, k, v: float64, or picked from a table, which is rounded in place of its numbers; or in the
# problem's dtype already
Values = tuple[Tensor | Picked, Tensor | Picked, Tensor | Picked]


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
    return normal_of(source, "q"), normal_of(source, "k"), normal_of(source, "v")


def normal_of(source: Source, name: str) -> Picked:
    """N(0, 1) for a whole tensor."""
    return source.picked(name, "normal", NORMAL)


def signs(words: Tensor) -> Tensor:
    """-1 for odd words and 1 for even ones, float64."""
    return (1 - 2 * (words & 1)).double()


def sparse_integers() -> Tensor:
    """Integers in [-2, 2] for each 16-bit word, 80 % of them 0, float64."""
    words = torch.arange(65536)
    some = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float64)[words & 3]
    return torch.where(words * 5 < 65536 * 4, 0.0, some)


SPARSE = Table(sparse_integers)
_SIZES = Table(lambda: NORMAL.values(torch.device("cpu")).abs())  # |N(0, 1)|
_BELOW_ZERO = Table(lambda: -_SIZES.values(torch.device("cpu")) - 0.0625)
_HALF_UP = Table(lambda: 0.5 + 0.5 * _SIZES.values(torch.device("cpu")))


@distribution(integer_dout=True)
def small_integers(source: Source) -> Values:
    """Integers in [-2, 2], 80 % zeros: Q K^T is exact in any order, so any difference in LSE is a
    wrong index."""
    q, k, v = (source.picked(name, "sparse", SPARSE) for name in "qkv")
    return q, k, v


@distribution()
def outliers(source: Source) -> Values:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), FlashAttention-3's accuracy test: rare large elements
    among small ones."""

    def mixed(name: str) -> Tensor:
        usual = normal_of(source, name)
        rare = (source.words(name, "rare") < 66).nonzero(as_tuple=True)  # 66 / 65536 is 0.001007
        large = source.picked(name, "outlier", NORMAL)
        both = [replace(each, drawn=each.words[rare]).values for each in (usual, large)]
        found = source.stored(usual)
        bits(found)[rare] = bits(source.stored(both[0] + 10.0 * both[1]))
        return found

    return mixed("q"), mixed("k"), mixed("v")


@distribution()
def large_logits(source: Source) -> Values:
    """Logits of about 1e4, both signs: overflow of scores, low precision sums or prescaling, exp of
    a wrong maximum."""
    product = source.per_score(1e4, math.sqrt(source.problem.head_dim))
    factor_q, factor_k = source.split(product)
    q, k = normal_of(source, "q"), normal_of(source, "k")
    return replace(q, factor=factor_q), replace(k, factor=factor_k), normal_of(source, "v")


_JITTER = Table(lambda: 1.0 + integer_table(-8, 8).values(torch.device("cpu")) / 64.0)


def _below(source: Source, logits: list[float]) -> Values:
    """Every logit near -logits (one number per row), none positive: q of one sign, k of the other,
    1/8 of jitter in each."""
    typical = source.per_score(max([1.0, *logits]), source.problem.head_dim)
    _, factor_k = source.split(typical)
    most = source.power(math.inf, headroom=2)
    sizes = {
        x: min(source.per_score(x, source.problem.head_dim) / factor_k, most) for x in set(logits)
    }
    row = source.floats([sizes[x] for x in logits])[:, None]
    q = -source.sign * row * source.picked("q", "jitter", _JITTER).values
    k = replace(source.picked("k", "jitter", _JITTER), factor=factor_k)
    return q, k, normal_of(source, "v")


@distribution()
def negative_lse(source: Source) -> Values:
    """All logits negative, LSE about -1000 and in every eighth row -100: exp(0 - LSE) of padding,
    maxima that start at 0."""
    first, rows = source.problem.seed, range(source.problem.seqlen_q)
    return _below(source, [100.0 if (first + row) % 8 == 0 else 1000.0 for row in rows])


@distribution()
def below_sentinel(source: Source) -> Values:
    """All logits near -131072: finite stand-ins for -inf (-1e4, -5e4) that valid scores fall
    below."""
    return _below(source, [131072.0] * source.problem.seqlen_q)


@distribution()
def equal_rows(source: Source) -> Values:
    """All keys of a head identical: uniform weights, so a key lost, doubled or masked too much
    shows in the normaliser."""
    batch, heads, seqlen, dim = source.shape("k")
    return (
        normal_of(source, "q"),
        source.normal("k", shape=(batch, heads, 1, dim)).expand(-1, -1, seqlen, -1),
        normal_of(source, "v"),
    )


@distribution()
def tied_maxima(source: Source) -> Values:
    """Each key occurs four times or more, far apart, and V < 0: exact ties of the row maximum,
    accumulators clamped at 0."""
    batch, heads, seqlen, dim = source.shape("k")
    different = max(seqlen // 4, 1)
    words = source.words("k", "normal", (batch, heads, different, dim))
    return (
        normal_of(source, "q"),
        Picked(NORMAL, words[:, :, source.arange(seqlen) % different]),
        source.picked("v", "normal", _BELOW_ZERO),
    )


def _ramp(source: Source, position: Tensor) -> Values:
    """Logits that grow by 1/4 to 7/8 per position in every row: score = a_i (position - seqlen_kv
    // 2), exactly.

    Summed over d, floor((x + d) / head_dim) is x (Hermite's identity); noise is added to one of two
    neighbouring elements of k and taken from the other, and q is constant along head_dim.
    """
    batch, heads, seqlen, dim = source.shape("k")
    centred = position - seqlen // 2
    ramp = (centred[:, None] + source.arange(dim)) // dim
    k = ramp.double().expand(batch, heads, seqlen, dim).clone()
    noise = source.integers("k", "noise", -4, 4, (batch, heads, seqlen, dim // 2))
    k[..., 0 : dim // 2 * 2 : 2] += noise
    k[..., 1 : dim // 2 * 2 : 2] -= noise
    scale = abs(source.problem.scale)
    # |scale| step is in [1/4, 1/2)
    step = source.power(math.ldexp(1.0, -1 - math.frexp(scale)[1]) if scale else 1.0)
    row = source.sign * step * (1.0 + source.rows(0, 4).double() / 4.0)
    return row.expand(source.shape("q")), k, normal_of(source, "v")


@distribution()
def increasing(source: Source) -> Values:
    """Logits grow with the key index: every block brings a new maximum and a rescale, which lazy
    schemes must not skip."""
    return _ramp(source, source.arange(source.problem.seqlen_kv))


@distribution()
def decreasing(source: Source) -> Values:
    """Logits shrink with the key index: no rescale after the first block, later blocks underflow
    against it."""
    return _ramp(source, source.arange(source.problem.seqlen_kv).flip(0))


@distribution()
def sink(source: Source) -> Values:
    """One key outweighs all others by e^20 or more (attention sink), the first or any: a maximum
    lost between warps."""
    batch, heads, seqlen, dim = source.shape("k")
    k = source.stored(normal_of(source, "k"))
    if seqlen:
        words = source.integers("k", "sink", 0, 65536, (batch, heads))
        where = (words & 1) * ((words >> 1) % seqlen)
        sink = source.stored(source.sign * source.power(source.per_score(48.0, dim)))
        place = source.arange(batch)[:, None], source.arange(heads), where
        bits(k)[place] = bits(sink)
    return source.picked("q", "normal", _HALF_UP), k, normal_of(source, "v")


@distribution()
def same_sign_v(source: Source) -> Values:
    """V > 0: the linear bias of truncating accumulators, which mean-zero values hide."""
    return normal_of(source, "q"), normal_of(source, "k"), source.picked("v", "normal", _SIZES)


@distribution()
def v_mean(source: Source) -> Values:
    """V = N(0, 1) plus a mean of 1 to 64 per column: a normaliser that does not match the weights,
    outputs off by a factor."""
    batch, heads, _, dim = source.shape("v")
    return (
        normal_of(source, "q"),
        normal_of(source, "k"),
        source.normal("v") + source.integers("v", "mean", 1, 65, (batch, heads, 1, dim)),
    )


@distribution()
def ones_v(source: Source) -> Values:
    """V = 1, so O = 1: row sums of other weights than those that multiply V."""
    return normal_of(source, "q"), normal_of(source, "k"), source.ones("v")


@distribution()
def one_hot_v(source: Source) -> Values:
    """V[j, c] = 1 where j = c (mod head_dim_v): O shows the weights themselves, so permuted keys or
    columns of V show."""
    _, _, seqlen, dim = source.shape("v")
    hot = source.arange(seqlen)[:, None] % dim == source.arange(dim)
    return (
        normal_of(source, "q"),
        normal_of(source, "k"),
        hot.double().expand(source.shape("v")),
    )


@distribution()
def zero_v_columns(source: Source) -> Values:
    """Every fourth column of V is 0, so that O is exactly 0 there: leaks between columns, unwritten
    output."""
    return (
        normal_of(source, "q"),
        normal_of(source, "k"),
        zero_columns(source),
    )


def zero_columns(source: Source) -> Tensor:
    """N(0, 1) for V, of which every fourth column is 0: +0 or -0, as the product with 0 is."""
    zero = source.arange(source.problem.head_dim_v) % 4 == 0
    v = source.stored(normal_of(source, "v"))
    kept = torch.where(zero, torch.iinfo(bits(v).dtype).min, -1).to(bits(v).dtype)
    return (bits(v) & kept).view(v.dtype)


@distribution()
def low_rank(source: Source) -> Values:
    """Rank 2 to 4 with a few strong channels, like real activations: correlations that Gaussian
    inputs do not have."""
    rank = 2 + source.picks("rank", 1)[0] % 3

    def product(name: str, basis: Tensor) -> Tensor:
        batch, heads, seqlen, _ = source.shape(name)
        coefficients = source.integers(name, "coefficients", -8, 8, (batch, heads, seqlen, rank))
        factors = coefficients.double() / 32.0
        exact = source.floats(0.0).expand(batch, heads, seqlen, basis.shape[1]).clone()
        for r in range(rank):  # multiples of 1/32 below 2^5: exact, fused or not
            exact.addcmul_(factors[..., r, None], basis[r].double())
        return exact

    strength = 1 + 3 * (source.arange(source.problem.head_dim) % 16 == 5).long()
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

    def mixed(name: str) -> Tensor:
        chosen = (source.words(name, "which") & 1).bool()
        if visible and name != "q":
            chosen |= source.arange(source.shape(name)[3]) % 4 == 0
        small = source.picked(name, "subnormal", _subnormal_table(fmt))
        return source.where(chosen, small, normal_of(source, name))

    q = mixed("q")
    if visible:
        boosted = source.arange(source.problem.head_dim) % 4 == 0
        large = replace(normal_of(source, "q"), factor=math.ldexp(1.0, -fmt.emin - 1))
        q = source.where(boosted, large, q)
    return q, mixed("k"), mixed("v")


@cache
def _subnormal_table(fmt: DType) -> Table:
    """Subnormal numbers of a format, of both signs, none of them 0."""

    def make() -> Tensor:
        words, more = torch.arange(65536), fmt.precision - 17
        fraction = words << more if more > 0 else words >> -more
        return signs(words) * fraction.clamp(min=1).double() * fmt.smallest_subnormal

    return Table(make)


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
    picks = source.picks("edge", 3)
    of_q, of_k = source.scores(_EDGES[picks[0] % len(_EDGES)], (0, 24, -24)[picks[1] % 3])
    kind = picks[2] % 5
    q, k = source.ones("q"), source.ones("k")
    if kind == 0:
        q, k = source.normal("q"), source.normal("k")
    elif kind == 1:  # keys of either sign
        k = k * -signs(source.integers("k", "side", 0, 2, (*source.shape("k")[:3], 1)))
    elif kind == 2:  # none is equal to another one
        k = source.picked("k", "jitter", _JITTER).values
    sign = source.sign * (-1.0 if kind == 3 else 1.0)
    row = source.floats([1.0, 0.5, 0.25, 0.125])[source.rows(0, 4)]
    return q * (sign * of_q * row), k * of_k, zero_columns(source)
