"""Matrix units on trial: kappa against sums made to lose as much as they can, on the emulated units
themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.emulation import fused_dot, serial_dot
from verify.arithmetic import dot
from verify.arithmetic.archs import archs
from verify.arithmetic.dtypes import DTYPES, dtype_named
from verify.arithmetic.mma import NearestChain, Promoted, Unit, accumulated, unit_for

UNITS = (
    *itertools.product(("sm_70", "sm_75", "sm_80", "sm_90"), ("float16",)),
    *itertools.product(("sm_80", "sm_90"), ("tf32",)),
    *itertools.product(("sm_89", "sm_90", "sm_100"), ("float8_e4m3fn",)),
)


def units() -> list[tuple[str, str, Unit]]:
    return [(arch, kind, unit_for(arch, kind)) for arch, kind in UNITS]


def test_an_unknown_arch_gets_the_most_pessimistic_unit():
    for kind in ("float16", "bfloat16", "tf32", "float8_e4m3fn", "float8_e5m2"):
        pessimist = unit_for("sm_999", kind)
        for arch, n in itertools.product([a.name for a in archs()], (1, 16, 1000, 100_000)):
            assert pessimist.kappa(n) >= unit_for(arch, kind).kappa(n), (arch, kind)
    with pytest.raises(ValueError, match="int4"):
        unit_for("sm_90", "int4")


def adversarial(unit: Unit, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sums that lose as much as they can: a large first product, then what is truncated away
    entirely, or nearly.

    Random operands have as many bits as leave their products exact: 4 for 8-bit units, else 11.
    """
    dtype = torch.float8_e4m3fn if unit.fraction < 23 else torch.float16
    ones = torch.ones(1, 1, n)
    for tail in (
        2.0**-unit.fraction,
        1.96 * 2.0**-unit.fraction,
        2.0**-unit.fraction * 0.9990234375,
        2.0**-12 + 2.0**-20,
    ):
        b = torch.full((1, n, 1), tail)
        b[0, 0] = 1.0
        yield ones, b
    generator = torch.Generator().manual_seed(3)
    a, b = (
        (torch.rand(1, *shape, generator=generator) + 0.5).to(dtype).float()
        for shape in ((8, n), (n, 8))
    )
    yield a, b
    yield a, b - 1.0


@pytest.mark.parametrize(
    ("arch", "kind", "unit"), units(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_kappa_bounds_the_unit_and_is_not_idle(arch: str, kind: str, unit: Unit):
    """Exact operands, wherever they lie, so that products are exact; tf32's own truncation is left
    out."""
    exact = replace(unit, operand_error=0.0)
    worst = 0.0
    for n in (1, 16, 100, 1024):
        for a, b in adversarial(exact, n):
            want, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            error = (fused_dot(a, b, exact).double() - want).abs() / size
            worst = max(worst, float((error / exact.kappa(n)).max()))
    assert worst <= 1
    assert worst >= 0.3


def test_kappa_bounds_rounding_to_nearest():
    unit = unit_for("cpu", "float32")
    worst = 0.0
    for n in (1, 16, 100, 1024):
        b = torch.full((1, n, 1), 0.999 * 2.0**-24)
        b[0, 0] = 1.0
        b[0, 1:2] = 2.0**-23  # an odd last place: ties and less are lost, one after the other
        error = (
            serial_dot(torch.ones(1, 1, n), b).double() - b.double().sum()
        ).abs() / b.double().sum()
        worst = max(worst, float(error) / unit.kappa(n))
    assert 0.3 <= worst <= 1


@pytest.mark.parametrize("unit", [Unit(16, 25, 23), NearestChain(1, 24, 24)], ids=["mma", "fp32"])
def test_zero_products_cost_nothing(unit: Unit):
    used = torch.tensor([0.0, 1.0, 7.0, 100.0], dtype=torch.float64)
    few = unit.kappas(used, 100)
    assert float(few[0]) == 0
    assert float(few[-1]) == pytest.approx(unit.kappa(100), rel=1e-12)
    assert bool((few.diff() > 0).all())
    apart = torch.zeros(1, 1, 100)
    apart[..., ::15] = 1.0 + 2.0**-10
    b = torch.full((1, 100, 1), 1.0 + 2.0**-9 + 2.0**-10)
    got = (serial_dot if isinstance(unit, NearestChain) else lambda x, y: fused_dot(x, y, unit))(
        apart, b
    ).double()
    assert float(
        ((got - apart.double() @ b.double()).abs() / (apart.double() @ b.double())).max()
    ) <= float(few[2])


def e4m3(*shape: int, seed: int = 0) -> Tensor:
    """Positive values of four significant bits, so that sums only grow."""
    return (
        (torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed)) + 0.5)
        .to(torch.float8_e4m3fn)
        .float()
    )


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_promotion_bounds_what_13_bits_lose(arch: str):
    """4096 products of one sign: promoted every 32, the sum keeps the bound of 32; in one chain it
    leaves that far behind."""
    unit, n = unit_for(arch, "float8_e4m3fn"), 4096
    a, b = e4m3(4, n), e4m3(n, 4, seed=1)
    want = a.double() @ b.double()
    parts = (fused_dot(a[:, :, at : at + 32], b[:, at : at + 32], unit) for at in range(0, n, 32))
    total = torch.zeros(1, 4, 4)
    for part in parts:
        total = total + part
    promoted = accumulated(unit, 32)
    assert float(((total.double() - want).abs() / want).max()) <= promoted.kappa(n)
    chained = ((fused_dot(a, b, unit).double() - want).abs() / want).min()
    assert promoted.kappa(n) < float(chained)
    assert float(chained) <= accumulated(unit, 0).kappa(n)
    used = torch.tensor([0.0, 5.0, 32.0, float(n)], dtype=torch.float64)
    assert float(promoted.kappas(used, n)[0]) == 0
    assert bool((promoted.kappas(used, n).diff() > 0).all())
    assert float(promoted.kappas(used, n)[-1]) == pytest.approx(promoted.kappa(n), rel=1e-12)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_a_rescaled_accumulator_loses_too(arch: str):
    """One product, then blocks whose products vanish: each rescale leaves 23 bits, and each block
    cuts them to 13."""
    unit, blocks = unit_for(arch, "float8_e4m3fn"), 64
    # just above 13 bits' neighbour of 1, which truncation goes down to
    factor = torch.tensor(1.0 - 2.0**-14 + 2.0**-20)
    total = want = fused_dot(torch.ones(1, 1, 1), torch.full((1, 1, 1), 1.875), unit)
    want = want.double()
    tiny = torch.full((1, 1, 1), 2.0**-18)
    for _ in range(blocks - 1):
        total = fused_dot(torch.ones(1, 1, 1), tiny, unit, total * factor)
        want = want * factor.double() + tiny.double()
    error = float((total.double() - want).abs() / want)
    assert unit.kappa(2) < error <= accumulated(unit, 0, unit.products, blocks).kappa(blocks)


def test_where_promotion_changes_nothing():
    for arch, kind in (("sm_100", "float8_e4m3fn"), ("sm_90", "float16"), ("cpu", "float8_e4m3fn")):
        unit = unit_for(arch, kind)
        assert accumulated(unit, 32, 64, 8) == accumulated(unit, 0, 64, 8) == unit
    narrow = unit_for("sm_90", "float8_e4m3fn")
    assert accumulated(narrow, 32, 64, 8).restarts == 0
    assert accumulated(narrow, 128, 64, 8).restarts == 2, (
        "parts of 128 run over the ends of blocks of 64"
    )
    assert accumulated(narrow, 48, 64, 8).restarts == 1


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


def climb(unit: Unit, kind: str) -> None:
    """The worst of many sums, changed a little and kept if worse, twelve generations: none may
    exceed its bound."""
    generator = torch.Generator().manual_seed(5)
    step = len(unit.wiring.order) or unit.products
    span = {1: 12, 2: 16}[dtype_named(kind).itemsize]
    for n in (step, 3 * step):
        a, b = (values(kind, (240, n), span, generator) for _ in range(2))
        for _ in range(12):
            error, bound = error_and_bound(a, b, unit)
            assert bool((error <= bound).all())
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
