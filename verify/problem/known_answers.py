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
from verify.arithmetic.rounding import Floats
from verify.problem import Problem, ProblemError
from verify.problem.distributions import Values, distribution
from verify.problem.premises import broken
from verify.problem.source import Integers, Source

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
    hit = np.arange(seqlen)[:, None] % max(dim - 1, 1) == np.arange(dim) - 1
    hit[:, 0] = True
    return (
        np.zeros(source.shape("q")),
        source.normal("k"),
        np.broadcast_to(hit, source.shape("v")).astype(np.float64),
    )


@distribution(oracle=True, integer_dout=True)
def integer_scores(source: Source) -> Values:
    """Small exact scores out of large partial sums: narrow accumulators of Q K^T, lost or swapped
    elements of head_dim.

    Integers in [-2, 2], 80 % zeros; and two elements of head_dim, one in each half, whose products
    are +x and -x, x a power of two up to 2^21 (2^11 in 8 bits): sum |q k| is below 2^23 (2^13), so
    that any order of adding is exact on any unit.
    """
    words = np.arange(65536)
    table = np.where(words * 5 < 65536 * 4, 0.0, np.array([-2.0, -1.0, 1.0, 2.0])[words & 3])
    q, k = table[source.words("q", "sparse")], table[source.words("k", "sparse")]
    half = source.problem.head_dim // 2
    if half:
        picks = source.integers("all", "pair", 0, 65536, (2,))
        first, second = (
            int(picks[0]) % half,
            half + int(picks[1]) % (source.problem.head_dim - half),
        )
        large_q, large_k = (
            (2.0**5, 2.0**6) if source.problem.format.itemsize == 1 else (2.0**10, 2.0**11)
        )
        q[..., first] = q[..., second] = large_q * _signed_powers(source, "q")
        k[..., first] = large_k * _signed_powers(source, "k")
        k[..., second] = -k[..., first]
    return q, k, source.normal("v")


def _signed_powers(source: Source, name: str) -> Floats:
    """+-1, +-1/2 or +-1/4 for each row of a tensor."""
    words = source.integers(name, "power", 0, 65536, source.shape(name)[:3])
    powers: Floats = np.where(words & 1, -1.0, 1.0) * np.array([1.0, 0.5, 0.25])[(words >> 1) % 3]
    return powers


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
    climbing = int(source.integers("all", "climb", 0, 65536, (1,))[0]) % dim
    k = source.words("k", "dyadic").astype(np.int64) % 5 - 2
    k[..., climbing] = np.arange(seqlen) * 5 // max(seqlen, 1) - 2
    words = source.integers("q", "own", 0, 65536, (*source.shape("q")[:3], 1))
    place = np.arange(source.problem.head_dim)
    own = np.where(words & 1, -1.0, 1.0) * (place == (words >> 2) % dim)
    q = np.where(place == climbing, np.where(words & 2, -1.0, 1.0), own)
    return q, k.astype(np.float64), source.integers("v", "dyadic", -4, 4).astype(np.float64)


@distribution(oracle=True, integer_dout=True)
def octaves(source: Source) -> Values:
    """Eight significant bits, 1/4 <= |x| < 2: normal numbers of every format, with room to be
    multiplied by powers of two."""
    words = np.arange(65536)
    exponents = np.array([math.ldexp(1.0, e - 7) for e in (-2, -1, 0)])
    table: Floats = (
        np.where(words & 1, -1.0, 1.0) * (128 + (words >> 1 & 127)) * exponents[(words >> 8) % 3]
    )
    q, k, v = (table[source.words(name, "octaves")] for name in "qkv")
    return q, k, v


@distribution(oracle=True, integer_dout=True)
def gather(source: Source) -> Values:
    """Each query selects one visible key, O = V[pi(i)] bit for bit: indexing, swizzles, tails, page
    tables, the GQA map.

    Keys are distinct +-1 codes, another set per key head; q_i is the code of key pi(i) times
    `gather_gain`.
    """
    return *_selecting(source), _distinct(source)


@distribution(oracle=True, integer_dout=True)
def gather_integers(source: Source) -> Values:
    """As `gather`, with integers in [-8, 8) for V: dO V^T and delta are equal and exact, so dQ = dK
    = 0 and dV scatters dO."""
    return *_selecting(source), source.integers("v", "gathered", -8, 8).astype(np.float64)


def _selecting(source: Source) -> tuple[Floats, Floats]:
    """q and k of `gather`."""
    problem = source.problem
    reason = gather_possible(problem)
    if reason is not None:
        raise ProblemError(reason)
    codes = _codes(source)
    chosen = gather_targets(problem).numpy()
    batch, heads = source.shape("q")[:2]
    own = np.broadcast_to(codes, (problem.batch, problem.heads_kv, *codes.shape[2:]))
    b, h = np.arange(batch)[:, None, None], (np.arange(heads) // problem.group)[:, None]
    if problem.seqlen_kv:
        # An empty row selects a key that it must not see: zeros would hide that it looked.
        q = own[
            b,
            h,
            np.where(chosen < 0, np.arange(problem.seqlen_q) % problem.seqlen_kv, chosen)[
                :batch, :heads
            ],
        ]
    else:
        q = np.ones(source.shape("q"))
    return q * (gather_gain(problem) * source.sign), np.broadcast_to(codes, source.shape("k"))


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


def _search_targets(problem: Problem, words: NDArray[np.uint64]) -> Integers:
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


def _codes(source: Source) -> Floats:
    """(batch, heads_kv, seqlen_kv, head_dim) of +-1, size 1 where k or q is expanded: element d is
    bit d mod bits of a bijective scramble of j, so that two keys differ in at least floor(head_dim
    / bits) elements."""
    problem = source.problem
    bits = _code_bits(problem)
    word = (1 << bits) - 1
    expand = problem.layout_q.expand + problem.layout_k.expand
    heads = (1 if "b" in expand else problem.batch, 1 if "h" in expand else problem.heads_kv)
    x = np.arange(problem.seqlen_kv) ^ (source.integers("k", "code", 0, 65536, (*heads, 1)) & word)
    for _ in range(2):  # an odd multiple and a xorshift are bijections of `bits`-bit words
        x = (x * 0x2C1B3C6D) & word
        x = x ^ (x >> max(bits // 2, 1))
    signs = np.where(x[..., None] >> np.arange(bits) & 1, 1.0, -1.0)
    return np.take(signs, np.arange(problem.head_dim) % bits, axis=-1)


def _distinct(source: Source) -> Floats:
    """Values that look unlike each other: normal, eight significant bits, 2^-6 <= |x| < 2^7, exact
    in every 16-bit format."""
    words = np.arange(65536)
    exponents = np.array([math.ldexp(1.0, e - 7) for e in range(-6, 7)])
    table: Floats = (
        np.where(words & 1, -1.0, 1.0) * (128 + (words >> 1 & 127)) * exponents[(words >> 8) % 13]
    )
    return table[source.words("v", "distinct")]
