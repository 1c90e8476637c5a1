"""From a Problem to its tensors: the same bits on every machine, in every process, with any number of threads.

`tensors` and `dout` give logical values on the CPU; how they lie in memory is the arena's concern.  Values are drawn in
float64 by `verify.distributions` and rounded by `cast`, an integer algorithm, because casts differ between devices (and
between the Triton interpreter, torch and ml_dtypes).  The two distributions whose answer an oracle knows are defined here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.distributions import DISTRIBUTIONS, Distribution, Floats, Integers, Source, Values, distribution
from verify.problem import Problem, ProblemError

GATHER_GAP = 160.0  # log2 units: beyond float32's 149, every other key's weight is exactly 0
_LOG2_E = 1.4426950408889634
_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Inputs:
    """Logical values of q, k and v: contiguous CPU tensors (batch, heads, seqlen, dim) in the problem's dtype.

    A dimension that the tensor's layout expands has size 1: it is stored once.  others: what else a run reads, by the name of
    its buffer ("descale_q", "dout"...), stored the same way.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them by the name of their buffer."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.others}


def tensors(problem: Problem) -> Inputs:
    """The inputs of a problem, its descales among them.

    Raises ProblemError if its distribution is unknown or impossible for it.
    """
    drawn = _distribution(problem).fill(Source(problem))
    q, k, v = (cast(_quantised(values, problem.format), problem.format) for values in drawn)
    return Inputs(q, k, v, descales(problem))


def _quantised(values: Floats, dtype: DType) -> Floats:
    """Values for a format without infinity saturate, as a quantiser lets them."""
    return values if dtype.has_infinity else np.clip(values, -dtype.max, dtype.max)


def descales(problem: Problem) -> dict[str, Tensor]:
    """float32 factors "descale_q", "descale_k" and "descale_v", (batch, heads_kv) or (1, 1) as stored; none for "none".

    Of eight significant bits, in [1/4, 4).  Where an oracle must know O bit for bit, powers of two, and those of q and k
    cancel: their product is 1 for a head's own factors, and another head's would show.
    """
    if problem.descaling == "none":
        return {}
    source, exact = Source(problem), _distribution(problem).oracle
    shape = (problem.batch, problem.heads_kv) if problem.descaling == "head" else (1, 1)
    found = {}
    for name in ("q", "k", "v"):
        words = source.words("q" if name == "k" and exact else name, "descale", shape).astype(np.int64)
        exponent = (words & 3) - 2
        mantissa = np.where(exact, 128, 128 + (words >> 2 & 127))
        powers = np.array([math.ldexp(1.0, e - 7) for e in range(-2, 3)])
        sign = -1 if name == "k" and exact else 1
        found[f"descale_{name}"] = cast(mantissa * powers[sign * exponent + 2], dtype_named("float32"))
    return found


def dequantised(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v at their full logical shapes: views of what the kernel gets; 8-bit ones in fp64, times their descales."""
    full = {"q": problem.shape_q, "k": problem.shape_k, "v": problem.shape_v}
    found = {name: getattr(inputs, name).expand(shape) for name, shape in full.items()}
    for name, tensor in found.items():
        if tensor.dtype.itemsize == 1:  # torch computes nothing with them
            found[name] = tensor.double()
        if f"descale_{name}" in inputs.others:
            factor = inputs.others[f"descale_{name}"].double().expand(problem.batch, problem.heads_kv)
            found[name] = tensor.double() * factor.repeat_interleave(tensor.shape[1] // problem.heads_kv, 1)[..., None, None]
    return found["q"], found["k"], found["v"]


def check_distribution(problem: Problem) -> None:
    """Raise ProblemError, in one line, if the problem's distribution is unknown or impossible for it."""
    _distribution(problem)
    reason = gather_possible(problem) if problem.distribution == "gather" else None
    if reason is not None:
        raise ProblemError(f"distribution: gather cannot be built: {reason}")


def dout(problem: Problem) -> Tensor:
    """The upstream gradient dO, (batch, heads_q, seqlen_q, head_dim_v) in O's dtype, contiguous, on the CPU.

    N(0, 1), or integers in [-2, 2] where the distribution is made of integers.
    """
    source = Source(problem)
    if _distribution(problem).integer_dout:
        values = (source.integers("out", "integers", 0, 65536) % 5 - 2).astype(np.float64)
    else:
        values = source.normal("out")
    return cast(values, problem.format_out)


def _distribution(problem: Problem) -> Distribution:
    try:
        return DISTRIBUTIONS[problem.distribution]
    except KeyError:
        raise ProblemError(f"distribution: {problem.distribution!r} is none of {', '.join(DISTRIBUTIONS)}") from None


def cast(values: Floats, dtype: DType) -> Tensor:
    """Round float64 values to `dtype`, to nearest, ties to even, subnormals kept: a tensor of the same shape.

    What is at least half a unit in the last place above the largest finite number becomes infinity, as IEEE 754 has it, or
    NaN in float8_e4m3fn, which has no infinity; nothing saturates.  At exactly half, the tie goes to the even neighbour:
    infinity for the IEEE formats, 448 for float8_e4m3fn.  A NaN becomes the positive quiet NaN; float64 is left as it is.
    """
    source = np.ascontiguousarray(values, dtype=np.float64).reshape(-1).view(np.uint64)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    result = np.empty(source.shape, dtype=unsigned)
    step = 1 << 14  # what fits a core's cache with its temporaries
    for start in range(0, source.size, step):
        result[start : start + step] = _round_bits(source[start : start + step], dtype)
    signed = torch.from_numpy(result.view(f"i{dtype.itemsize}"))
    return signed.view(dtype.torch).reshape(values.shape)


def _bits(value: int) -> np.uint64:
    return np.uint64(value)


def _round_bits(bits: NDArray[np.uint64], dtype: DType) -> NDArray[np.uint64]:
    """Bit patterns of float64 to bit patterns of `dtype`.

    A float64 is sig * 2**(e - 1075).  Its last kept place is 2**(max(e, least) - 1023 - fraction_bits), so the shift grows
    below the normal range; the rounded significand is added to the exponent field, and its carry does the rest.
    """
    if dtype.itemsize == 8:
        return bits
    fraction_bits = dtype.precision - 1
    least = _bits(1023 + dtype.emin)  # float64's exponent field of the smallest normal number
    magnitude = bits & _bits((1 << 63) - 1)
    field = magnitude >> _bits(52)
    significand = (magnitude & _bits((1 << 52) - 1)) | ((field > _bits(0)).astype(np.uint64) << _bits(52))
    exponent = np.maximum(field, least)
    below = exponent - np.maximum(field, _bits(1))
    shift = np.minimum(below + _bits(52 - fraction_bits), _bits(62))
    tie = (_bits(1) << (shift - _bits(1))) - _bits(1) + ((significand >> shift) & _bits(1))
    rounded = ((significand + tie) >> shift) + ((exponent - least) << _bits(fraction_bits))
    largest, quiet = _encoded_limits(dtype)
    np.copyto(rounded, _bits(largest + 1), where=rounded > _bits(largest))
    sign = (bits >> _bits(63)) << _bits(8 * dtype.itemsize - 1)
    return np.where(magnitude > _bits(0x7FF << 52), _bits(quiet), rounded | sign)


def _encoded_limits(dtype: DType) -> tuple[int, int]:
    """Bit patterns of the largest finite number and of the quiet NaN; the pattern after the largest is infinity or NaN."""
    fraction_bits = dtype.precision - 1
    fraction, exponent = math.frexp(dtype.max)
    largest = ((exponent - dtype.emin) << fraction_bits) + int(math.ldexp(2 * fraction - 1, fraction_bits))
    return largest, largest + 1 + (1 << (fraction_bits - 1)) * dtype.has_infinity


@distribution(oracle=True, integer_dout=True)
def counting(source: Source) -> Values:
    """q = 0, so O counts visible keys: every mask, window, length and alignment off by one.

    V's column 0 is 1 and column c > 0 is 1 where j = c - 1 (mod head_dim_v - 1): O[.., c] = hits_c / visible keys.
    """
    _, _, seqlen, dim = source.shape("v")
    hit = np.arange(seqlen)[:, None] % max(dim - 1, 1) == np.arange(dim) - 1
    hit[:, 0] = True
    return np.zeros(source.shape("q")), source.normal("k"), np.broadcast_to(hit, source.shape("v")).astype(np.float64)


@distribution(oracle=True, integer_dout=True)
def gather(source: Source) -> Values:
    """Each query selects one visible key, O = V[pi(i)] bit for bit: indexing, swizzles, tails, page tables, the GQA map.

    Keys are distinct +-1 codes, another set per key head; q_i is the code of key pi(i) times `gather_gain`.
    """
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
        q = own[b, h, np.where(chosen < 0, np.arange(problem.seqlen_q) % problem.seqlen_kv, chosen)[:batch, :heads]]
    else:
        q = np.ones(source.shape("q"))
    return q * (gather_gain(problem) * source.sign), np.broadcast_to(codes, source.shape("k")), _distinct(source)


def gather_possible(problem: Problem) -> str | None:
    """Why `gather` cannot be built for that problem, or None."""
    bits = _code_bits(problem)
    if problem.softcap:
        return "softcap: it bounds the logits, so no key can outweigh the others"
    if problem.head_dim < bits:
        return f"head_dim: {problem.head_dim} elements cannot hold the {bits} bits of {problem.seqlen_kv} keys"
    if abs(problem.scale) < 1e-30 or gather_gain(problem) > problem.format.max:
        return f"softmax_scale: {problem.scale} is too small for a gap of {GATHER_GAP:g} in {problem.dtype}"
    if problem.layout_q.expand and any(mask.kind in ("lengths", "dense") for mask in problem.mask.atoms):
        return f"layout_q: rows of an expanded q see different keys under {problem.mask.name}"
    return None


def gather_gain(problem: Problem) -> float:
    """G > 0, the least normal number of three significant bits with |scale| log2(e) 2 G floor(head_dim / bits) >= 160."""
    needed = GATHER_GAP / (abs(problem.scale) * _LOG2_E * 2 * (problem.head_dim // _code_bits(problem)))
    fraction, exponent = math.frexp(needed)
    return max(math.ldexp(math.ceil(fraction * 8), exponent - 3), math.ldexp(1.0, problem.format.emin))


def gather_targets(problem: Problem) -> Tensor:
    """pi: the key that each query of `gather` selects, int64 (batch, heads_q, seqlen_q); -1 where a row sees no key."""
    source = Source(problem)
    shape = source.shape("q")[:3]
    words = source.raw("q", "target", math.prod(shape)).reshape(shape)
    logical = (problem.batch, problem.heads_q, problem.seqlen_q)
    if 0 in logical or problem.seqlen_kv == 0:
        return torch.full(logical, -1, dtype=torch.int64)
    try:
        low, high = (
            n.numpy().astype(np.int64) for n in problem.mask.row_bounds(problem.batch, *logical[2:], problem.seqlen_kv)
        )
    except ValueError:
        return torch.from_numpy(_search_targets(problem, np.broadcast_to(words, logical)))
    low, high = low[: shape[0], None], high[: shape[0], None]
    chosen = low + (words % np.maximum(high - low, 1).astype(np.uint64)).astype(np.int64)
    return torch.from_numpy(np.broadcast_to(np.where(high > low, chosen, -1), logical).copy())


def _search_targets(problem: Problem, words: NDArray[np.uint64]) -> Integers:
    """`gather_targets` where rows see no single interval: the (word mod visible)-th visible key, a few rows at a time."""
    targets = np.full(words.shape, -1, dtype=np.int64)
    mod = problem.mask.mod(problem.seqlen_q, problem.seqlen_kv)
    keys = torch.arange(problem.seqlen_kv)
    rows = max(_PAIRS_AT_ONCE // problem.seqlen_kv, 1)
    for b, h in np.ndindex(words.shape[:2]):
        for start in range(0, problem.seqlen_q, rows):
            queries = torch.arange(start, min(start + rows, problem.seqlen_q))[:, None]
            seen = mod(torch.tensor(b), torch.tensor(h), queries, keys).expand(len(queries), len(keys)).numpy()
            ordinal = np.cumsum(seen, axis=1)
            visible = ordinal[:, -1:]
            wanted = words[b, h, start : start + rows, None] % np.maximum(visible, 1).astype(np.uint64)
            first = np.argmax(ordinal == wanted.astype(np.int64) + 1, axis=1)
            targets[b, h, start : start + rows] = np.where(visible[:, 0] > 0, first, -1)
    return targets


def _code_bits(problem: Problem) -> int:
    return max(1, (problem.seqlen_kv - 1).bit_length()) if problem.seqlen_kv else 1


def _codes(source: Source) -> Floats:
    """(batch, heads_kv, seqlen_kv, head_dim) of +-1, size 1 where k or q is expanded: element d is bit d mod bits of a
    bijective scramble of j, so that two keys differ in at least floor(head_dim / bits) elements."""
    problem = source.problem
    bits = _code_bits(problem)
    word = (1 << bits) - 1
    expand = problem.layout_q.expand + problem.layout_k.expand
    heads = (1 if "b" in expand else problem.batch, 1 if "h" in expand else problem.heads_kv)
    x = np.arange(problem.seqlen_kv) ^ (source.integers("k", "code", 0, 65536, (*heads, 1)) & word)
    for _ in range(2):  # an odd multiple and a xorshift are bijections of `bits`-bit words
        x = (x * 0x2C1B3C6D) & word
        x = x ^ (x >> max(bits // 2, 1))
    ones = x[..., None] >> (np.arange(problem.head_dim) % bits) & 1
    return (2 * ones - 1).astype(np.float64)


def _distinct(source: Source) -> Floats:
    """Values that look unlike each other: normal, eight significant bits, 2^-6 <= |x| < 2^7, exact in every 16-bit format."""
    words = np.arange(65536)
    exponents = np.array([math.ldexp(1.0, e - 7) for e in range(-6, 7)])
    table: Floats = np.where(words & 1, -1.0, 1.0) * (128 + (words >> 1 & 127)) * exponents[(words >> 8) % 13]
    return table[source.words("v", "distinct")]
