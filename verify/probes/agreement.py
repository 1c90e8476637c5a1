"""Compares a matrix instruction with its model, bit for bit, on a million seeded dot products.

Sign, exponent and fraction of operands are drawn separately by torch's generator on the CPU, so the
operands are the same on all machines.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DTYPES, DType
from verify.probes.instructions import COLUMNS, WORDS, Dot, Instruction, Tiles
from verify.probes.lab import hexadecimal
from verify.probes.report import Agreement, Mismatch

DOTS = 1 << 20
_AT_ONCE = 1 << 15  # dot products that the model computes in one call


def agree(instruction: Instruction, tiles: Tiles, model: Dot, dots: int = DOTS) -> Agreement:
    """Compare a device (`tiles`) with the model on at least `dots` dot products."""
    count = -(-dots // (instruction.rows * COLUMNS * len(KINDS)))
    total, nan, by_kind, first = 0, 0, {}, {}
    for kind in KINDS:
        drawn = draw(instruction, kind, count)
        sums = as_sums(*drawn)
        got = tiles(*drawn).flatten()
        parts = [
            model(*(x[at : at + _AT_ONCE] for x in sums)) for at in range(0, len(got), _AT_ONCE)
        ]
        want = torch.cat(parts)
        differs = _words(got) != _words(want)
        both = differs & got.double().isnan() & want.double().isnan()
        if got.dtype == torch.float64:
            differs = differs & ~both  # IEEE 754: any of several NaN can be the result
        total, nan = total + len(got), nan + int(both.sum())
        if bool(differs.any()):
            by_kind[kind] = int(differs.sum())
        for name, where in (("number", differs & ~both), ("nan", both)):
            if name not in first and bool(where.any()):
                at = int(where.nonzero()[0])
                a, b, c, device, expected = (hexadecimal(x[at]) for x in (*sums, got, want))
                first[name] = Mismatch(kind, tuple(a), tuple(b), c[0], device[0], expected[0])
    return Agreement(
        total, sum(by_kind.values()), nan, by_kind, first.get("number", first.get("nan"))
    )


def as_sums(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of every element of the tiles as dot products: a (n, k), b (n, k), c (n,)."""
    _, rows, depth = a.shape
    left = _words(a)[:, :, None].expand(-1, -1, COLUMNS, -1).reshape(-1, depth)
    right = _words(b)[:, None].expand(-1, rows, -1, -1).reshape(-1, depth)
    return left.view(a.dtype), right.view(b.dtype), c.flatten()


def _words(x: Tensor) -> Tensor:
    return x.contiguous().view(WORDS[x.element_size()])


# Drawing.


@dataclass(frozen=True)
class _Spread:
    """The lowest and highest exponents of operands and of C.  None: the format's limit, but for
    operands so that a product does not overflow."""

    operands: tuple[int | None, int | None]
    c: tuple[int | None, int | None]
    right: tuple[int | None, int | None] | None = None  # of B, if not those of A


_SPREADS = {
    "every exponent": _Spread((None, None), (None, None)),
    "near 1": _Spread((-3, 3), (-3, 6)),
    "alignment": _Spread((-8, 8), (-16, 16)),
    "large C": _Spread((-6, 4), (4, 26)),
    "cancelling": _Spread((-14, 0), (-26, 0)),
    "sparse": _Spread((-8, 8), (-16, 16)),
    "subnormal A": _Spread((-1 << 10, -1 << 10), (None, -12), (None, None)),
    "subnormal results": _Spread((None, -60), (-1 << 11, -1 << 11), (None, -60)),
    "overflow": _Spread((1 << 10, 1 << 10), (1 << 11, 1 << 11)),
}
KINDS = ("random bits", *_SPREADS)


def draw(instruction: Instruction, kind: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """a (count, rows, k), b (count, 8, k) and c (count, rows, 8) of a kind; deterministic."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{instruction.name} {kind}".encode()))
    stored = DTYPES["float32"] if instruction.operands == "tf32" else instruction.format
    shapes = [(count, rows, instruction.depth) for rows in (instruction.rows, COLUMNS)]
    shape_c = (count, instruction.rows, COLUMNS)
    if kind == "random bits":
        a, b, c = (
            _any(random, *args)
            for args in ((shapes[0], stored), (shapes[1], stored), (shape_c, instruction.result))
        )
        return a, b, c
    spread = _SPREADS[kind]
    largest = _top(instruction.result) // 2 - 3
    spans = [
        (low, largest if high is None else high)
        for low, high in (spread.operands, spread.right or spread.operands)
    ]
    a, b = (
        _numbers(random, shape, stored, span) for shape, span in zip(shapes, spans, strict=True)
    )
    c = _numbers(random, shape_c, instruction.result, spread.c)
    if kind == "cancelling":
        _cancel(random, a, b)
    if kind == "sparse":
        for x in (a, b, c):
            _words(x).masked_fill_(_below(random, x.shape, 4) > 0, 0)
    return a, b, c


def _below(random: torch.Generator, shape: tuple[int, ...], limit: int) -> Tensor:
    return torch.randint(limit, shape, generator=random)


def _any(random: torch.Generator, shape: tuple[int, ...], format: DType) -> Tensor:
    """Random bits, including infinities and NaN."""
    size = 8 * format.itemsize
    high, low = _below(random, shape, 1 << (size // 2)), _below(random, shape, 1 << (size // 2))
    return _as_float((high << (size // 2)) | low, format)


def _numbers(
    random: torch.Generator,
    shape: tuple[int, ...],
    format: DType,
    span: tuple[int | None, int | None],
) -> Tensor:
    """Finite numbers with exponents from `span`, any sign and any fraction.  Exponents out of the
    format's range are moved to its limit."""
    fraction_bits = format.precision - 1
    least, largest = format.emin - 1, _top(format)
    low = least if span[0] is None else min(max(span[0], least), largest - 2)
    high = largest if span[1] is None else min(max(span[1], low + 2), largest)
    field = low + _below(random, shape, high - low + 1) - format.emin + 1
    fraction = _below(random, shape, 1 << fraction_bits)
    sign = _below(random, shape, 2) << (8 * format.itemsize - 1)
    values = _as_float(sign | field << fraction_bits | fraction, format)
    broken = ~values.double().isfinite()  # e4m3's NaN lies among its largest numbers
    return _as_float(_words(values).long() & ~broken.long(), format)


def _top(format: DType) -> int:
    return math.frexp(format.max)[1] - 1


def _as_float(bits: Tensor, format: DType) -> Tensor:
    word = WORDS[format.itemsize]
    size = 8 * format.itemsize
    if word != torch.uint8 and size < 64:
        bits = (bits + (1 << (size - 1))) % (1 << size) - (1 << (size - 1))
    return bits.to(word).view(format.torch)


def _cancel(random: torch.Generator, a: Tensor, b: Tensor) -> None:
    """Make some products of each tile the negatives of others, at random positions."""
    left, right = _words(a), _words(b)
    sign = torch.iinfo(left.dtype).min if left.dtype != torch.uint8 else 0x80
    depth = a.shape[-1]
    for tile in range(len(a)):
        order = torch.randperm(depth, generator=random)
        pairs = int(_below(random, (1,), depth // 2)) + 1
        plus, minus = order[:pairs], order[pairs : 2 * pairs]
        left[tile][:, minus] = left[tile][:, plus]
        right[tile][:, minus] = right[tile][:, plus] ^ sign
