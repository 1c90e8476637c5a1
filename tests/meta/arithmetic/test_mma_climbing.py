"""Matrix units on trial, with operands as they are stored: sums found by climbing, or crafted,
nearly reach kappa and do not exceed it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from verify.arithmetic import dot
from verify.arithmetic.dtypes import DTYPES, dtype_named
from verify.arithmetic.mma import Promoted, Unit, accumulated, unit_for

# From here on the bit-accurate units themselves, with operands as they are stored.
STORED = [
    (arch, kind, accumulator, instruction)
    for arch, kind, instruction in (
        ("sm_70", "float16", ""),
        ("sm_75", "float16", "mma.sync"),
        ("sm_80", "bfloat16", ""),
        ("sm_90", "float16", ""),
        ("sm_89", "float8_e4m3fn", ""),
        ("sm_90", "float8_e5m2", "wgmma"),
        ("sm_90", "float8_e4m3fn", "mma.sync"),
        ("sm_90", "float8_e4m3fn", "mma.sync.m16n8k16"),
        ("sm_100", "float8_e5m2", "tcgen05"),
    )
    for accumulator in ("float32", "float16")
    if accumulator == "float32" or kind != "bfloat16"
]
NAMED = pytest.mark.parametrize(
    ("arch", "kind", "accumulator", "instruction"), STORED, ids=lambda part: part or "any"
)


def error_and_bound(a: Tensor, b: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
    """|computed - exact| of rows of products, (rows, n), and what kappa, underflow and misalignment
    allow."""
    start = "float32" if isinstance(unit, Promoted) and not unit.own else unit.accumulator
    got = dot.fused_dot(a, b, torch.zeros(len(a), dtype=DTYPES[start].torch), unit).double()
    products = a.double() * b.double()
    size, n = products.abs().sum(-1), a.shape[-1]
    largest = float(torch.maximum(a.double().abs(), b.double().abs()).max())
    bound = unit.kappas((products != 0).sum(-1).double(), n) * size + unit.underflow(n)
    bound += unit.misalignment(n, dtype_named(str(a.dtype).removeprefix("torch.")), largest)
    return torch.where(size < unit.domain(n), (got - products.sum(-1)).abs(), 0.0), bound


def values(kind: str, shape: tuple[int, int], span: int, generator: torch.Generator) -> Tensor:
    """Every significand, exponents down to -span, rows of one sign and of both, subnormals among
    the small."""
    bits = dtype_named(kind).precision - 1
    significand = 1 + torch.randint(0, 1 << bits, shape, generator=generator) / (1 << bits)
    exponent = torch.randint(-span, 1, shape, generator=generator)
    sign = 1 - 2 * torch.randint(0, 2, shape, generator=generator) * torch.randint(
        0, 2, (shape[0], 1), generator=generator
    )
    return (sign * significand * torch.exp2(exponent.float())).to(dtype_named(kind).torch)


def climb(
    unit: Unit,
    kind: str,
    judged: Callable[[Tensor, Tensor, Unit], tuple[Tensor, Tensor]] = error_and_bound,
) -> float:
    """The worst of many sums, changed a little and kept if worse, twelve generations: none may
    exceed its bound.  Returns the largest error over bound."""
    generator = torch.Generator().manual_seed(5)
    step = len(unit.wiring.order) or unit.products
    span = {1: 12, 2: 16}[dtype_named(kind).itemsize]
    worst = 0.0
    for n in (step, 3 * step):
        a, b = (values(kind, (240, n), span, generator) for _ in range(2))
        for _ in range(12):
            error, bound = judged(a, b, unit)
            assert bool((error <= bound).all())
            worst = max(worst, float((error / bound).nan_to_num().max()))
            kept = (error / bound).argsort(descending=True)[:40].repeat(6)
            a, b = (
                torch.where(
                    (torch.rand(240, n, generator=generator) < 2 / n)
                    & (torch.arange(240) >= 40)[:, None],
                    values(kind, (240, n), span, generator).float(),
                    x[kept].float(),
                ).to(x.dtype)
                for x in (a, b)
            )
    return worst


@pytest.mark.first_look(4)
@NAMED
def test_no_sum_found_by_climbing_exceeds_its_bound(
    arch: str, kind: str, accumulator: str, instruction: str
):
    climb(unit_for(arch, kind, accumulator, instruction), kind)


@pytest.mark.parametrize("accumulator", ["float32", "float16"])
@pytest.mark.parametrize(
    "changes", [{"addend": "after"}, {"normalises": True}, {"zero": None}], ids=str
)
def test_bounds_do_not_depend_on_the_wiring(changes: dict[str, object], accumulator: str):
    unit = unit_for("sm_80", "float16", accumulator)
    climb(replace(unit, wiring=replace(unit.wiring, **changes)), "float16")


def split(value: float, kind: str) -> tuple[float, float]:
    """Two operands whose product is that: a power of two, and the rest, which the format holds as a
    normal number."""
    dtype, power = dtype_named(kind), 2.0 ** math.floor(math.log2(value) / 2)
    assert float(torch.tensor(value / power).to(dtype.torch)) == value / power
    assert min(power, value / power) >= 2.0**dtype.emin
    return power, value / power


def crafted(unit: Unit, kind: str, groups: int) -> tuple[Tensor, Tensor]:
    """One product of 2**8, and what is nearly 2**-F of it; in every group one more, that the
    conversion cuts nearly all of."""
    dtype, top = dtype_named(kind), 2.0**8
    place = top * 2.0**-unit.fraction
    tail = split((1 - dtype.unit_roundoff) * place, kind)
    cut = split((1 - dtype.unit_roundoff) * 2.0 ** (unit.fraction - unit.output) * place, kind)
    pairs = [pair for _ in range(groups) for pair in (cut, *[tail] * (unit.products - 1))]
    pairs[1] = (16.0, 16.0)
    return tuple(torch.tensor([[pair[side] for pair in pairs]]).to(dtype.torch) for side in (0, 1))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("sm_70", "float16"),
        ("sm_80", "bfloat16"),
        ("sm_90", "float16"),
        ("sm_89", "float8_e5m2"),
        ("sm_90", "float8_e4m3fn"),
    ],
)
def test_kappa_is_nearly_reached(arch: str, kind: str, groups: int):
    unit = unit_for(arch, kind)
    error, bound = error_and_bound(*crafted(unit, kind, groups), unit)
    # Where F = p, a first group of 4 loses 3 terms of the 4 + 1 that are counted.
    assert (0.58 if groups == 1 else 0.7) <= float(error / bound) <= 1


@pytest.mark.parametrize(
    ("arch", "kind"), [("sm_80", "bfloat16"), ("sm_90", "float16"), ("sm_90", "float8_e4m3fn")]
)
def test_a_unit_of_fewer_bits_exceeds_what_is_claimed(arch: str, kind: str):
    unit = unit_for(arch, kind)
    fewer = replace(unit, fraction=unit.fraction - 1, output=min(unit.output, unit.fraction - 1))
    # Of 32 products the conversion is too small a part for two bits of it to show.
    for planted in (
        fewer,
        *([replace(unit, output=unit.output - 2)] if unit.products < 32 else []),
    ):
        error, _ = error_and_bound(*crafted(planted, kind, 8), planted)
        _, bound = error_and_bound(*crafted(planted, kind, 8), unit)
        assert float(error) > float(bound)


@pytest.mark.parametrize(
    ("arch", "groups"), [("sm_70", 1), ("sm_80", 4), ("sm_90", 1), ("sm_90", 16)]
)
def test_kappa_of_an_fp16_accumulator_is_nearly_reached(arch: str, groups: int):
    """1, and just over half a last place in each group: every conversion rounds up."""
    unit = unit_for(arch, "float16", "float16")
    a, b = torch.zeros(2, 1, (groups + 1) * unit.products, dtype=torch.float16)
    a[0, 0] = b[0, 0] = 1.0
    a[0, unit.products :: unit.products], b[0, unit.products :: unit.products] = (
        2.0**-6,
        2.0**-5 * (1 + 2.0**-10),
    )
    error, bound = error_and_bound(a, b, unit)
    assert 0.9 <= float(error / bound) * (groups + 1) / groups <= 1.02
    assert float(error / bound) <= 1
    # fp32's bound is left far behind: an fp16 accumulator under a claim of fp32 shows.
    assert float(error) > 100 * unit_for(arch, "float16").kappa(a.shape[-1])


def test_sums_of_one_sign_stand_still_in_fp16():
    """2048 and 100 ones: an fp16 accumulator that adds them singly stays where it is, and its bound
    knows."""
    unit = replace(unit_for("sm_70", "float16", "float16"), products=1)
    ones = torch.ones(1, 101, dtype=torch.float16)
    many = ones.clone()
    many[0, 0] = 2048
    error, bound = error_and_bound(many, ones, unit)
    assert float(error) == 100
    assert float(error) <= float(bound)


def test_fp16_underflow_is_absolute():
    unit = unit_for("sm_90", "float16", "float16")
    tiny = torch.full((1, 1), 2.0**-13, dtype=torch.float16)
    got = float(dot.fused_dot(tiny, tiny, torch.zeros(1).half(), unit))
    assert abs(got - 2.0**-26) > unit.kappa(1) * 2.0**-26
    assert 0.4 * unit.underflow(1) <= abs(got - 2.0**-26) <= unit.underflow(1)


def test_the_domain_of_an_fp16_accumulator():
    """Sums of one sign just inside never overflow; 65520 and more do."""
    unit = unit_for("sm_80", "float16", "float16")
    generator = torch.Generator().manual_seed(6)
    a = torch.rand(400, 64, generator=generator).half()
    room = unit.domain(64) / (a.double() ** 2).sum(-1, keepdim=True)
    inside = (a.double() * room.sqrt() * (1 - 2.0**-11)).half()
    assert bool(((inside.double() ** 2).sum(-1) > 0.99 * unit.domain(64)).all())
    fits = (inside.double() ** 2).sum(-1) < unit.domain(64)
    assert int(fits.sum()) > 300
    assert bool(dot.fused_dot(inside, inside, torch.zeros(400).half(), unit)[fits].isfinite().all())
    full = torch.tensor([[256.0, 4.0]]).half()
    assert not bool(
        dot.fused_dot(
            full, torch.tensor([[255.0, 60.0]]).half(), torch.zeros(1).half(), unit
        ).isfinite()
    )
    assert unit.domain(64) < 65520 < unit_for("sm_80", "float16").domain(64)
    promoted = accumulated(unit, 32)
    assert promoted.domain(4096) == unit.domain(32)


@pytest.mark.parametrize(
    ("arch", "kind", "instruction"),
    [
        ("sm_90", "float16", ""),
        ("sm_100", "float8_e5m2", "tcgen05"),
        ("sm_89", "float8_e4m3fn", ""),
    ],
)
def test_a_subnormal_operand_misaligns(arch: str, kind: str, instruction: str):
    """The largest product has a subnormal operand and is aligned as if it were normal: the others
    are cut before their time."""
    unit, dtype = unit_for(arch, kind, instruction=instruction), dtype_named(kind)
    big = 2.0 ** math.floor(math.log2(dtype.max))
    tail = split((1 - dtype.unit_roundoff) * 2.0 ** (dtype.emin - unit.fraction) * big, kind)
    pairs = [(dtype.smallest_subnormal, big), *[tail] * (unit.products - 1)]
    a, b = (torch.tensor([[pair[side] for pair in pairs]]).to(dtype.torch) for side in (0, 1))
    alone = unit.kappa(unit.products) * float((a.double() * b.double()).sum())
    error, bound = error_and_bound(a, b, unit)
    assert 2 * alone < float(error) <= float(bound)
    assert float(error / bound) > 0.5, "misalignment is not idle"
    normal = replace(unit, wiring=replace(unit.wiring, normalises=True))
    error, bound = error_and_bound(a, b, normal)
    assert float(error) <= float(bound) < 1.01 * alone


def test_emulated_fp8_of_blackwell_needs_a_bound_of_its_own():
    """mma.sync converts twice in 32 products where tcgen05 does once: 7.9 places of 2**-25 against
    7."""
    unit = unit_for("sm_100", "float8_e4m3fn", instruction="mma.sync")
    tail = 1.75 * 1.125 * 2.0**-8
    a, b = torch.zeros(2, 1, 32).to(torch.float8_e4m3fn).float()
    a[0, 0] = b[0, 0] = 256.0
    for k in (1, 2):  # bytes 0 and 1 of a register are added first, 2 and 3 then
        a[0, k], b[0, k] = 1.75 * 2.0**-4, 1.125 * 2.0**-4
        assert float(a[0, k] * b[0, k]) == tail
    stored = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    got = float(dot.fused_dot(*stored, torch.zeros(1), unit))
    error, size = 2.0**16 + 2 * tail - got, 2.0**16 + 2 * tail
    used = torch.tensor([3.0], dtype=torch.float64)
    assert (
        error
        > 1.1
        * float(unit_for("sm_100", "float8_e4m3fn", instruction="tcgen05").kappas(used, 32))
        * size
    )
    assert error <= float(unit.kappas(used, 32)) * size
    assert error <= float(unit_for("sm_100", "float8_e4m3fn").kappas(used, 32)) * size
