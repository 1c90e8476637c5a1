"""Distributions whose answer an oracle knows: built for it, and left out of ordinary draws.

Built as those of `verify.problem.distributions` are, by integer arithmetic, tables and elementwise
IEEE operations alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from references.premises import Premise
from verify.problem import Problem, ProblemError
from verify.problem.distributions import SPARSE, Values, distribution, normal_of, signs
from verify.problem.premises import broken
from verify.problem.source import FIVE_INTEGERS, Source, Table, bits, integer_table

GATHERS = ("gather", "gather_integers")
# A key outweighs the others by what its product is larger than theirs.
GATHER_NEEDS = frozenset({Premise.LINEAR_SCORES, Premise.POSITION_FREE_SCORES})
_LARGEST_GATHERED = 2.0**11  # 2^-24 of it is half of what rounds to 1 in fp16
GATHER_GAP = 160.0  # log2 units: beyond float32's 149, every other key's weight is exactly 0
_LOG2_E = 1.4426950408889634
_PAIRS_AT_ONCE = 1 << 20


@distribution(oracle=True, integer_dout=True)
def counting(source: Source) -> Values:
    """q = 0, so O counts visible keys: every mask, window, length and alignment off by one.

    V's column 0 is 1 and column c > 0 is 1 where j = c - 1 (mod head_dim_v - 1): O[.., c] = hits_c
    / visible keys.
    """
    _, _, seqlen, dim = source.shape("v")
    hit = source.arange(seqlen)[:, None] % max(dim - 1, 1) == source.arange(dim) - 1
    hit[:, 0] = True
    return (
        source.floats(0.0).expand(source.shape("q")),
        normal_of(source, "k"),
        hit.double().expand(source.shape("v")),
    )


@distribution(oracle=True, integer_dout=True)
def integer_scores(source: Source) -> Values:
    """Small exact scores out of large partial sums: narrow accumulators of Q K^T, lost or swapped
    elements of head_dim.

    Integers in [-2, 2], 80 % zeros; and two elements of head_dim, one in each half, whose products
    are +x and -x, x a power of two up to 2^21 (2^11 in 8 bits): sum |q k| is below 2^23 (2^13), so
    that any order of adding is exact on any unit.
    """
    q, k = (source.stored(source.picked(name, "sparse", SPARSE)) for name in "qk")
    half = source.problem.head_dim // 2
    if half:
        picks = source.picks("pair", 2)
        first = picks[0] % half
        second = half + picks[1] % (source.problem.head_dim - half)
        large_q, large_k = (
            (2.0**5, 2.0**6) if source.problem.format.itemsize == 1 else (2.0**10, 2.0**11)
        )
        of_q = large_q * _signed_powers(source, "q")
        of_k = large_k * _signed_powers(source, "k")
        for place, row in ((first, of_k), (second, -of_k)):
            bits(q)[..., place] = bits(source.stored(of_q))
            bits(k)[..., place] = bits(source.stored(row))
    return q, k, normal_of(source, "v")


def _signed_powers(source: Source, name: str) -> Tensor:
    """+-1, +-1/2 or +-1/4 for each row of a tensor, float64."""
    words = source.integers(name, "power", 0, 65536, source.shape(name)[:3])
    return signs(words) * source.floats([1.0, 0.5, 0.25])[(words >> 1) % 3]


DYADIC_RANGE = 8  # of the scores of `dyadic`: no weight is below 2^-8 of the row's largest


@distribution(oracle=True, integer_dout=True)
def dyadic(source: Source) -> Values:
    """Integer scores in [-4, 4] and integers for V: under a scale of ln 2 every weight is a power
    of two, so sums are exact.

    q_i holds +-1 at one element common to all rows, along which k climbs from -2 to 2, so that the
    maximum moves from block to block; and +-1 at one element of its own, where k is an integer in
    [-2, 2].
    """
    _, _, seqlen, dim = source.shape("k")
    climbing = source.picks("climb", 1)[0] % dim
    k = source.stored(source.picked("k", "dyadic", FIVE_INTEGERS))
    climb = (source.arange(seqlen) * 5 // max(seqlen, 1) - 2).double()
    bits(k)[..., climbing] = bits(source.stored(climb))
    words = source.integers("q", "own", 0, 65536, (*source.shape("q")[:3], 1))
    place = source.arange(source.problem.head_dim)
    common, own = (bits(source.stored(signs(words >> shift))) for shift in (1, 0))
    zero = own & torch.iinfo(own.dtype).min  # of that sign
    q = torch.where(place == (words >> 2) % dim, own, zero)
    q = torch.where(place == climbing, common, q).view(k.dtype)
    return q, k, source.picked("v", "dyadic", integer_table(-4, 4))


@distribution(oracle=True, integer_dout=True)
def octaves(source: Source) -> Values:
    """Eight significant bits, 1/4 <= |x| < 2: normal numbers of every format, with room to be
    multiplied by powers of two."""
    q, k, v = (source.picked(name, "octaves", _OCTAVES) for name in "qkv")
    return q, k, v


def _eight_bits(exponents: range) -> Tensor:
    """Numbers of eight significant bits, of both signs, with these exponents of the first bit, for
    each 16-bit word."""
    words = torch.arange(65536)
    units = torch.tensor([math.ldexp(1.0, e - 7) for e in exponents], dtype=torch.float64)
    sized = (128 + (words >> 1 & 127)) * units[(words >> 8) % len(exponents)]
    return signs(words) * sized


_OCTAVES = Table(lambda: _eight_bits(range(-2, 1)))
# They look unlike each other: 2^-6 <= |x| < 2^7, exact in every 16-bit format.
_DISTINCT = Table(lambda: _eight_bits(range(-6, 7)))


@distribution(oracle=True, integer_dout=True)
def gather(source: Source) -> Values:
    """Each query selects one visible key, O = V[pi(i)] bit for bit: indexing, swizzles, tails, page
    tables, the GQA map.

    Keys are distinct +-1 codes, another set per key head; q_i is the code of key pi(i) times
    `gather_gain`.
    """
    return *_selecting(source), source.picked("v", "distinct", _DISTINCT)


@distribution(oracle=True, integer_dout=True)
def gather_integers(source: Source) -> Values:
    """As `gather`, with integers in [-8, 8) for V: dO V^T and delta are equal and exact, so dQ = dK
    = 0 and dV scatters dO."""
    return *_selecting(source), source.picked("v", "gathered", integer_table(-8, 8))


def _selecting(source: Source) -> tuple[Tensor, Tensor]:
    """q and k of `gather`."""
    problem = source.problem
    reason = gather_possible(problem)
    if reason is not None:
        raise ProblemError(reason)
    codes = _codes(source)
    batch, heads = source.shape("q")[:2]
    chosen = gather_targets(problem)[:batch, :heads].to(source.device)
    own = codes.expand(problem.batch, problem.heads_kv, -1, -1)
    b = source.arange(batch)[:, None, None]
    h = (source.arange(heads) // problem.group)[:, None]
    if problem.seqlen_kv:
        # An empty row selects a key that it must not see: zeros would hide that it looked.
        other = source.arange(problem.seqlen_q) % problem.seqlen_kv
        q = own[b, h, torch.where(chosen < 0, other, chosen)]
    else:
        q = source.ones("q").bool()
    gain = gather_gain(problem) * source.sign
    k = source.where(codes, 1.0, -1.0).expand(source.shape("k"))
    return source.where(q, gain, -gain), k.clone(memory_format=torch.contiguous_format)


def gather_possible(problem: Problem) -> str | None:
    """Why `gather` cannot be built for that problem, or None."""
    bits = _code_bits(problem)
    reason = broken(GATHER_NEEDS, problem)
    if reason is not None:
        return reason
    if problem.head_dim < bits:
        return (
            f"head_dim: {problem.head_dim} elements cannot hold the {bits} bits of"
            f" {problem.seqlen_kv} keys"
        )
    if abs(problem.scale) < 1e-30 or gather_gain(problem) > problem.format.max:
        return (
            f"softmax_scale: {problem.scale} is too small for a gap of {GATHER_GAP:g} in"
            f" {problem.dtype}"
        )
    if abs(problem.scale) * gather_gain(problem) * problem.head_dim > _LARGEST_GATHERED:
        return (
            f"softmax_scale: {problem.scale} makes scores so large that their rounding shows in a"
            " weight"
        )
    if problem.layout_q.expand and any("batch" in atom.varies for atom in problem.mask.atoms):
        return f"layout_q: rows of an expanded q see different keys under {problem.mask.name}"
    return None


def gather_gain(problem: Problem) -> float:
    """G > 0, the least normal number of three significant bits with |scale| log2(e) 2 G
    floor(head_dim / bits) >= 160."""
    needed = GATHER_GAP / (
        abs(problem.scale) * _LOG2_E * 2 * (problem.head_dim // _code_bits(problem))
    )
    fraction, exponent = math.frexp(needed)
    return max(
        math.ldexp(math.ceil(fraction * 8), exponent - 3), math.ldexp(1.0, problem.format.emin)
    )


def gather_targets(problem: Problem) -> Tensor:
    """pi: the key that each query of `gather` selects, int64 (batch, heads_q, seqlen_q); -1 where a
    row sees no key."""
    source = Source(problem)
    shape = source.shape("q")[:3]
    words = source.raw("q", "target", math.prod(shape)).reshape(shape)
    logical = (problem.batch, problem.heads_q, problem.seqlen_q)
    if 0 in logical or problem.seqlen_kv == 0:
        return torch.full(logical, -1, dtype=torch.int64)
    try:
        low, high = (
            n.numpy().astype(np.int64)
            for n in problem.mask.row_bounds(problem.batch, *logical[2:], problem.seqlen_kv)
        )
    except ValueError:
        return torch.from_numpy(_search_targets(problem, np.broadcast_to(words, logical)))
    low, high = low[: shape[0], None], high[: shape[0], None]
    chosen = low + (words % np.maximum(high - low, 1).astype(np.uint64)).astype(np.int64)
    return torch.from_numpy(np.broadcast_to(np.where(high > low, chosen, -1), logical).copy())


def _search_targets(problem: Problem, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`gather_targets` where rows see no single interval: the (word mod visible)-th visible key, a
    few rows at a time."""
    targets = np.full(words.shape, -1, dtype=np.int64)
    mod = problem.mask.mod(problem.seqlen_q, problem.seqlen_kv)
    keys = torch.arange(problem.seqlen_kv)
    rows = max(_PAIRS_AT_ONCE // problem.seqlen_kv, 1)
    for b, h in np.ndindex(words.shape[:2]):
        for start in range(0, problem.seqlen_q, rows):
            queries = torch.arange(start, min(start + rows, problem.seqlen_q))[:, None]
            seen = (
                mod(torch.tensor(b), torch.tensor(h), queries, keys)
                .expand(len(queries), len(keys))
                .numpy()
            )
            ordinal = np.cumsum(seen, axis=1)
            visible = ordinal[:, -1:]
            wanted = words[b, h, start : start + rows, None] % np.maximum(visible, 1).astype(
                np.uint64
            )
            first = np.argmax(ordinal == wanted.astype(np.int64) + 1, axis=1)
            targets[b, h, start : start + rows] = np.where(visible[:, 0] > 0, first, -1)
    return targets


def _code_bits(problem: Problem) -> int:
    return max(1, (problem.seqlen_kv - 1).bit_length()) if problem.seqlen_kv else 1


def _codes(source: Source) -> Tensor:
    """Signs, bool (batch, heads_kv, seqlen_kv, head_dim), True for 1 and False for -1.

    Of size 1 where k or q is expanded.  Element d is bit d mod width of a bijective scramble of j,
    so that two keys differ in at least floor(head_dim / width) elements.
    """
    problem = source.problem
    width = _code_bits(problem)
    word = (1 << width) - 1
    expand = problem.layout_q.expand + problem.layout_k.expand
    heads = (1 if "b" in expand else problem.batch, 1 if "h" in expand else problem.heads_kv)
    scramble = source.integers("k", "code", 0, 65536, (*heads, 1)) & word
    x = source.arange(problem.seqlen_kv) ^ scramble
    for _ in range(2):  # an odd multiple and a xorshift are bijections of words of that width
        x = (x * 0x2C1B3C6D) & word
        x = x ^ (x >> max(width // 2, 1))
    return (x[..., None] >> source.arange(problem.head_dim) % width & 1).bool()
