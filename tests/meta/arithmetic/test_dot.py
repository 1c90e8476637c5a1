"""The bit-accurate matrix units on trial: against fractions of the bit patterns, published probes
and planted other units."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.harness.fraction_dot import LAYOUTS, SPECIAL, decoded, encoded, slow_dot
from verify.arithmetic.dot import fused_dot, mma
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.mma import Promoted, Unit, unit_for


def tensor(words: Sequence[Sequence[int]] | Sequence[int], kind: str) -> Tensor:
    dtype = dtype_named("float32" if kind == "tf32" else kind)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    wide = torch.tensor(words, dtype=torch.int64)
    if dtype.itemsize > 1:
        limit = 1 << (8 * dtype.itemsize - 1)
        wide = torch.where(wide >= limit, wide - 2 * limit, wide)
    return wide.to(word).view(dtype.torch)


def words_of(x: Tensor) -> list[int]:
    bits = 8 * x.element_size()
    return [w % (1 << bits) for w in x.view({16: torch.int16, 32: torch.int32}[bits]).tolist()]


def drawn(kind: str, count: int, rng: random.Random, spread: int) -> list[int]:
    """Patterns whose exponents lie within `spread` of one another, zeros and subnormals among them,
    and any pattern at all."""
    exponent_bits, fraction_bits, _ = LAYOUTS[kind]
    width = 1 + exponent_bits + fraction_bits
    if rng.random() < 0.05:
        return [rng.getrandbits(width) for _ in range(count)]
    top = (1 << exponent_bits) - (2 if LAYOUTS[kind][2] else 1)
    low = rng.choice((0, rng.randint(0, top)))
    found = []
    for _ in range(count):
        field = min(top, low + rng.randint(0, spread))
        fraction = rng.choice(
            (
                0,
                (1 << fraction_bits) - 1,
                rng.getrandbits(fraction_bits),
                rng.getrandbits(fraction_bits),
            )
        )
        if kind == "float8_e4m3fn" and field == top:
            fraction &= 5
        word = 0 if rng.random() < 0.08 else field << fraction_bits | fraction
        found.append(word | rng.getrandbits(1) << (width - 1))
    return found


@cache
def cases(
    kind: str, unit: Unit, count: int, terms: int, seed: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    rng = random.Random(f"{kind} {unit.products} {unit.fraction} {seed}")
    a, b, c = [], [], []
    for _ in range(count):
        spread = rng.choice((0, 2, 6, 14))
        a.append(drawn(kind, terms, rng, spread))
        b.append(drawn(kind, terms, rng, spread))
        c.append(near(a[-1], b[-1], kind, unit, rng))
    return a, b, c


def near(a: Sequence[int], b: Sequence[int], kind: str, unit: Unit, rng: random.Random) -> int:
    """An accumulator of about the products' size, so that both are cut."""
    exponent_bits, fraction_bits, _ = LAYOUTS[unit.accumulator]
    width, bias = 1 + exponent_bits + fraction_bits, (1 << (exponent_bits - 1)) - 1
    choice = rng.random()
    if choice < 0.15:
        return rng.choice(
            (0, 1 << (width - 1), 1, (1 << fraction_bits) - 1, rng.getrandbits(width))
        )
    sizes = [decoded(x, kind)[1] + decoded(y, kind)[1] for x, y in zip(a, b, strict=True)]
    field = min(max(max(sizes) + bias + rng.randint(-30, 10), 0), (1 << exponent_bits) - 2)
    fraction = rng.choice((rng.getrandbits(fraction_bits), (1 << fraction_bits) - 1))
    return field << fraction_bits | fraction | rng.getrandbits(1) << (width - 1)


REAL = [
    (arch, kind, accumulator, instruction)
    for arch, kinds, instruction in (
        ("sm_70", ("float16",), ""),
        ("sm_75", ("float16",), "mma.sync"),
        ("sm_80", ("float16", "bfloat16", "tf32"), ""),
        ("sm_89", ("float8_e4m3fn", "float8_e5m2"), ""),
        ("sm_90", ("float16", "bfloat16", "tf32", "float8_e4m3fn", "float8_e5m2"), "wgmma"),
        ("sm_100", ("float8_e4m3fn", "float8_e5m2"), "tcgen05"),
    )
    for kind in kinds
    for accumulator in ("float32", "float16")
    if accumulator == "float32" or kind not in ("bfloat16", "tf32")
]


def disagreements(kind: str, unit: Unit, other: Unit, count: int, seed: int = 0) -> int:
    """Of how many of that many cases `fused_dot` by `unit` differs from fractions by `other`; two
    groups and a half each."""
    step = len(unit.wiring.order) or unit.products
    a, b, c = cases(kind, unit, count, 2 * step + (0 if unit.wiring.order else step // 2), seed)
    got = fused_dot(tensor(a, kind), tensor(b, kind), tensor(c, unit.accumulator), unit)
    want = [slow_dot(*row, kind, other) for row in zip(a, b, c, strict=True)]
    return sum(x != y for x, y in zip(words_of(got), want, strict=True))


@pytest.mark.first_look(6)
@pytest.mark.parametrize(
    ("arch", "kind", "accumulator", "instruction"), REAL, ids=lambda part: part or "any"
)
def test_every_unit_agrees_with_fractions_bit_for_bit(
    arch: str, kind: str, accumulator: str, instruction: str
):
    unit = unit_for(arch, kind, accumulator, instruction)
    assert disagreements(kind, unit, unit, 60) == 0


BASE = unit_for("sm_90", "float16")
VARIED = {
    "after": replace(BASE.wiring, addend="after"),
    "normalising": replace(BASE.wiring, normalises=True),
    "no zero": replace(BASE.wiring, zero=None),
    "zeros align": replace(BASE.wiring, zero=0),
    "reversed": replace(BASE.wiring, order=tuple(reversed(range(32)))),
    "interleaved": replace(BASE.wiring, order=tuple(range(0, 32, 2)) + tuple(range(1, 32, 2))),
    "signed": replace(BASE.wiring, zeros="signed"),
    "ieee": replace(BASE.wiring, zeros="ieee"),
    "saturating": replace(BASE.wiring, overflow="saturate"),
    "quiet": replace(BASE.wiring, nan="quiet"),
}


@pytest.mark.first_look(5)
@pytest.mark.parametrize("accumulator", ["float32", "float16"])
@pytest.mark.parametrize("name", list(VARIED))
def test_every_wiring_agrees_with_fractions(name: str, accumulator: str):
    unit = replace(unit_for("sm_90", "float16", accumulator), wiring=VARIED[name])
    assert disagreements("float16", unit, unit, 60, seed=1) == 0


PLANTED = {
    "F - 1": replace(BASE, fraction=24),
    "F + 1": replace(BASE, fraction=26),
    "L / 2": replace(BASE, products=8),
    "2 L": replace(BASE, products=32),
    "to nearest": replace(BASE, rounding="nearest"),
    "13 bits out": replace(BASE, output=13),
    "normalised": replace(BASE, wiring=VARIED["normalising"]),
    "C added after": replace(BASE, wiring=VARIED["after"]),
    "zeros align": replace(BASE, wiring=VARIED["zeros align"]),
    "last products first": replace(BASE, wiring=VARIED["reversed"]),
    "payload": replace(BASE, wiring=VARIED["quiet"]),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_the_cases_tell_a_planted_unit(fault: str):
    """The comparison would see each of these, so that its silence says something."""
    a, b, c = cases("float16", BASE, 300, 32, 0)
    arguments = tensor(a, "float16"), tensor(b, "float16"), tensor(c, "float32")
    assert words_of(fused_dot(*arguments, BASE)) != words_of(fused_dot(*arguments, PLANTED[fault]))


def dot(a: Sequence[float], b: Sequence[float], c: float, kind: str, unit: Unit) -> Tensor:
    stored = dtype_named("float32" if kind == "tf32" else kind).torch
    accumulator = "float32" if isinstance(unit, Promoted) and not unit.own else unit.accumulator
    return fused_dot(
        torch.tensor(a).to(stored),
        torch.tensor(b).to(stored),
        torch.tensor(c).to(dtype_named(accumulator).torch),
        unit,
    )


@pytest.mark.parametrize(
    ("arch", "kind", "want"),
    [
        ("sm_70", "float16", 0.0),
        ("sm_75", "float16", -0.5),
        ("sm_80", "float16", -0.5),
        ("sm_80", "bfloat16", -0.5),
        ("sm_89", "float16", -0.5),
        ("sm_90", "float16", -0.75),
        ("sm_100", "bfloat16", -0.75),
        ("sm_120", "float16", -0.75),
        ("sm_89", "float8_e5m2", 0.0),
        ("sm_90", "float8_e5m2", 0.0),
        ("sm_120", "float8_e5m2", -0.75),
    ],
)
def test_the_published_probe_tells_generations_apart(arch: str, kind: str, want: float):
    """C = 2^23 and products -2^23, -1/2, -1/4, -1/8."""
    unit = unit_for(arch, kind, instruction="mma.sync" if arch != "sm_90" else "")
    got = dot([4096.0, 1, 1, 1], [-2048.0, -0.5, -0.25, -0.125], 2.0**23, kind, unit)
    assert float(got) == want


def test_fp64_is_a_chain_of_fused_multiply_adds():
    unit = unit_for("sm_80", "float64")
    a, b = (
        torch.tensor([4096.0, 1, 1, 1]).double(),
        torch.tensor([-2048.0, -0.5, -0.25, -0.125]).double(),
    )
    assert float(fused_dot(a, b, torch.tensor(2.0**23).double(), unit)) == -0.875
    generator = torch.Generator().manual_seed(4)
    a, b, c = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((50, 4), (50, 4), (50,))
    )
    for row in range(50):
        want = float(c[row])
        for x, y in zip(a[row].tolist(), b[row].tolist(), strict=True):
            # Fraction to float rounds to nearest even
            want = float(Fraction(x) * Fraction(y) + Fraction(want))
        assert float(fused_dot(a[row], b[row], c[row], unit)) == want


@pytest.mark.parametrize(("kind", "accumulator"), [("float32", "float32"), ("float16", "float16")])
def test_chains_of_other_formats_round_once(kind: str, accumulator: str):
    """fp32 and fp16 chains against fractions: ties, subnormals and sums of far apart sizes, where
    two roundings would show."""
    unit = unit_for("cpu", kind, accumulator)
    rng = random.Random(7)
    fraction_bits = LAYOUTS[kind][1]
    for _ in range(300):
        a, b = (drawn(kind, 1, rng, 3) for _ in range(2))
        c = near(a, b, kind, unit, rng) if rng.random() < 0.5 else drawn(accumulator, 1, rng, 2)[0]
        values = [decoded(w, kind)[0] for w in (*a, *b)] + [decoded(c, accumulator)[0]]
        if any(v in SPECIAL for v in values):
            continue
        x, y, z = (Fraction(v) for v in values)
        got = words_of(
            fused_dot(tensor(a, kind), tensor(b, kind), tensor([c], accumulator)[0], unit).reshape(
                1
            )
        )[0]
        nearest = encoded(
            x * y + z,
            Unit(
                1,
                60,
                fraction_bits,
                accumulator=accumulator,
                rounding="nearest",
                wiring=VARIED["signed"],
            ),
            32 if fraction_bits == 23 else 16,
        )
        assert got == nearest or (x * y + z == 0 and not got << 1 & 0xFFFF), (a, b, c)


def test_e4m3_through_mma_sync_on_hopper_is_fp16():
    """Two groups of 16 in the order of the bytes, from zero, and one fp32 addition, as compilers
    make it."""
    unit = unit_for("sm_90", "float8_e4m3fn", instruction="mma.sync")
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(40, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    c = torch.randn(40, generator=generator) * 100
    got, total = fused_dot(a, b, c, unit), c
    half = unit_for("sm_90", "float16")
    for at in (0, 32):
        part = torch.zeros(40)
        for low in (0, 2):
            chosen = [at + j for j in range(32) if j % 4 // 2 * 2 == low]
            part = fused_dot(a[:, chosen].half(), b[:, chosen].half(), part, half)
        total = total + part
    assert torch.equal(got, total)
    assert not torch.equal(got, fused_dot(a, b, c, unit_for("sm_90", "float8_e4m3fn")))


def test_a_matrix_is_its_elements():
    generator = torch.Generator().manual_seed(2)
    a, b = (
        torch.randn(5, 32, generator=generator).half(),
        torch.randn(32, 3, generator=generator).half(),
    )
    c = torch.randn(5, 3, generator=generator)
    got = mma(a, b, c, BASE)
    for i, j in itertools.product(range(5), range(3)):
        assert got[i, j] == fused_dot(a[i], b[:, j], c[i, j], BASE)


def test_what_no_unit_adds_is_refused():
    half = torch.zeros(4).half()
    with pytest.raises(ValueError, match="several ways"):
        fused_dot(half, half, torch.tensor(0.0), unit_for("sm_75", "float16"))
    with pytest.raises(ValueError, match="float16"):
        fused_dot(half, half, torch.tensor(0.0), unit_for("sm_90", "float16", "float16"))
    with pytest.raises(ValueError, match="float64"):
        fused_dot(half.double(), half.double(), torch.tensor(0.0), BASE)
    with pytest.raises(ValueError, match="multiple of 32"):
        fused_dot(
            half.to(torch.float8_e5m2),
            half.to(torch.float8_e5m2),
            torch.tensor(0.0),
            unit_for("sm_90", "float8_e5m2", instruction="mma.sync"),
        )


def test_a_negative_underflow_keeps_its_sign_or_not():
    tiny = torch.tensor([2.0**-75], dtype=torch.bfloat16)
    for zeros, want in (("signed", True), ("positive", False)):
        unit = replace(unit_for("sm_90", "bfloat16"), wiring=replace(BASE.wiring, zeros=zeros))
        got = fused_dot(tiny, -tiny, torch.tensor(0.0), unit)
        assert float(got) == 0
        assert bool(got.signbit()) is want


def test_large_products_that_cancel_are_finite():
    unit = unit_for("sm_90", "bfloat16")
    big = torch.tensor([2.0**100, 2.0**100, 1.0], dtype=torch.bfloat16)
    assert (
        float(
            fused_dot(big, torch.tensor([1.0, -1.0, 0.0]).bfloat16() * big, torch.tensor(0.0), unit)
        )
        == 0
    )
    assert float(fused_dot(big, big, torch.tensor(0.0), unit)) == math.inf


def test_patterns_are_read_as_the_formats_say():
    """The slow model's own decoding, against torch's."""
    for kind in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        width = 8 * dtype_named(kind).itemsize
        words = list(range(1 << width)) if width == 8 else list(range(0, 1 << 16, 7))
        for word, value in zip(words, tensor(words, kind).float().tolist(), strict=True):
            want = decoded(word, kind)[0]
            assert str(value) == want if want in SPECIAL else Fraction(value) == want, (kind, word)
    assert decoded(struct.unpack("<I", struct.pack("<f", 1.0 + 2.0**-23))[0], "tf32")[0] == 1
