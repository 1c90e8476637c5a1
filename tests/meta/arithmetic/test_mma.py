"""Matrix units on trial: kappa against sums made to lose as much as they can, on the emulated units
themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.emulated_sums import fused_dot, serial_dot
from verify.arithmetic.archs import archs
from verify.arithmetic.mma import NearestChain, Unit, accumulated, unit_for

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


@pytest.mark.first_look(3)
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
