"""Matrix units on trial: kappa against sums made to lose as much as they can, on the emulated units themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.meta.emulation import fused_dot, serial_dot
from verify.arithmetic.mma import ARCHES, NearestChain, Unit, known, unit_for


def units() -> list[tuple[str, str, Unit]]:
    fp16 = [(arch, "float16", unit_for(arch, "float16")) for arch in ("sm_70", "sm_75", "sm_80", "sm_90")]
    return fp16 + [(arch, "tf32", unit_for(arch, "tf32")) for arch in ("sm_80", "sm_90")]


def test_an_unknown_arch_gets_the_most_pessimistic_unit():
    assert known("sm_90")
    assert known("sm_89")
    assert not known("sm_999")
    for kind in ("float16", "bfloat16", "tf32"):
        pessimist = unit_for("sm_999", kind)
        for arch, n in itertools.product(ARCHES, (1, 16, 1000, 100_000)):
            assert pessimist.kappa(n) >= unit_for(arch, kind).kappa(n), (arch, kind)
    with pytest.raises(ValueError, match="int4"):
        unit_for("sm_90", "int4")


def adversarial(unit: Unit, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sums that lose as much as they can: a large first product, then what is truncated away entirely, or nearly."""
    ones = torch.ones(1, 1, n)
    for tail in (2.0**-unit.fraction, 1.96 * 2.0**-unit.fraction, 2.0**-unit.fraction * 0.9990234375, 2.0**-12 + 2.0**-20):
        b = torch.full((1, n, 1), tail)
        b[0, 0] = 1.0
        yield ones, b
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(1, *shape, generator=generator).half().float() + 0.5 for shape in ((8, n), (n, 8)))
    yield a, b
    yield a, b - 1.0


@pytest.mark.parametrize(("arch", "kind", "unit"), units(), ids=lambda part: part if isinstance(part, str) else "")
def test_kappa_bounds_the_unit_and_is_not_idle(arch: str, kind: str, unit: Unit):
    """Exact operands of 11 bits, wherever they lie, so that products are exact; tf32's own truncation is left out."""
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
        error = (serial_dot(torch.ones(1, 1, n), b).double() - b.double().sum()).abs() / b.double().sum()
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
    got = (serial_dot if isinstance(unit, NearestChain) else lambda x, y: fused_dot(x, y, unit))(apart, b).double()
    assert float(((got - apart.double() @ b.double()).abs() / (apart.double() @ b.double())).max()) <= float(few[2])
