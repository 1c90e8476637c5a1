"""Matrix probes of a device: another unit disagrees, bit for bit, and a whole probe says where."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.meta.probes.test_probes import E4M3, HOPPER, TF32, model, tiles_of, wired
from verify.arithmetic.unit import Unit
from verify.probes import agreement, matrix
from verify.probes.instructions import INSTRUCTIONS, Bench, spread
from verify.probes.lab import UnrepresentableError, factors, representable
from verify.probes.toolchain import Launch, Program

torch.set_num_threads(1)

BY_NAME = {one.name: one for one in INSTRUCTIONS}
F16 = BY_NAME["mma.sync m16n8k16 f16 into f32"]


def test_factors_are_exact() -> None:
    for one in INSTRUCTIONS:
        least = 2 * (one.format.emin - one.format.precision + 1)
        for exponent in range(max(least, -1000), 2, 7):
            x, y = factors(-(2.0**exponent), one.format)
            assert x * y == -(2.0**exponent)
            assert representable(x, one.format)
            assert representable(y, one.format)
    with pytest.raises(UnrepresentableError):
        factors(2.0**-19, BY_NAME["mma.sync m16n8k32 e4m3 into f32"].format)


# Bit for bit.


def test_what_is_drawn_is_the_same_and_varied() -> None:
    for one in (F16, TF32, E4M3, BY_NAME["mma.sync m8n8k4 f64 into f64"]):
        for kind in agreement.KINDS:
            first, second = agreement.draw(one, kind, 2), agreement.draw(one, kind, 2)
            for x, y in zip(first, second, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
                assert kind == "random bits" or x.double().isfinite().all()
            assert first[0].shape == (2, one.rows, one.depth)
            assert len(first[0].double().flatten().unique()) > one.depth


@pytest.mark.parametrize(
    ("unit", "kinds"),
    [
        (replace(HOPPER, products=8), {"near 1", "alignment", "cancelling"}),
        (replace(HOPPER, fraction=24), {"near 1", "alignment", "cancelling"}),
        (replace(HOPPER, rounding="nearest"), {"near 1", "large C"}),
        (wired(addend="after"), {"cancelling"}),
        (wired(normalises=True), {"subnormal A"}),
        (wired(nan="quiet"), {"random bits"}),
        (wired(zeros="ieee"), set()),
    ],
    ids=["L", "F", "rounding", "C after", "normalised", "NaN", "zeros"],
)
def test_a_device_that_is_another_unit_disagrees(unit: Unit, kinds: set[str]) -> None:
    device = tiles_of(F16, unit)
    got = agreement.agree(F16, device, model(HOPPER), 20_000)
    assert got.dots >= 20_000
    assert kinds <= set(got.by_kind)
    assert got.mismatches == sum(got.by_kind.values())
    if not kinds:
        return
    first = got.first
    assert first is not None
    assert (len(first.a), len(first.c), first.device == first.model) == (16, 8, False)
    assert (got.nan == got.mismatches) == (unit.wiring.nan == "quiet")
    again = agreement.agree(F16, tiles_of(F16, HOPPER), model(HOPPER), 20_000)
    assert (again.mismatches, again.first) == (0, None)


@dataclass(frozen=True)
class ModelBench(Bench):
    """A device that is the model."""

    unit: Unit = HOPPER

    def tiles(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return tiles_of(self.instruction, self.unit)(a, b, c)


def test_a_whole_probe_says_what_disagrees() -> None:
    unit = matrix.table_unit("sm_90", F16)
    assert unit is not None
    got = matrix.probe(ModelBench(F16, unit=unit), "sm_90", 5_000)
    assert (got.error, got.agrees, got.guess) == ("", True, False)
    got = matrix.probe(ModelBench(F16, unit=replace(unit, fraction=24)), "sm_90", 5_000)
    assert (got.error, got.agrees) == ("", False)
    assert got.agreement is not None
    assert got.agreement.mismatches
    wrong = {
        quantity.name: (quantity.measured, quantity.expected)
        for quantity in got.structure
        if not quantity.agrees
    }
    assert wrong["fraction bits F"] == ("24", "25")
    assert matrix.probe(ModelBench(F16), "sm_999", 5_000).guess
    assert matrix.table_unit("sm_100", BY_NAME["wgmma m64n8k8 tf32 into f32"]) is None


def test_what_goes_wrong_is_in_the_result() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the driver says no")

    got = matrix.probe(Bench(F16, broken, "cpu"), "sm_90", 100)
    assert got.error.startswith("structure: RuntimeError: the driver says no; special: ")
    assert not got.structure

    calls = []

    def fails_later(program: Program, how: Launch, arguments: ctypes.Structure) -> None:
        calls.append(how.blocks)
        if len(calls) > 3:
            raise RuntimeError("no more")

    got = matrix.probe(Bench(F16, fails_later, "cpu"), "sm_90", 100)
    assert "agreement: RuntimeError: no more" in got.error


def test_dot_products_are_spread_over_the_tile() -> None:
    """Every row and column is used, and each result comes back in its place."""
    seen: set[tuple[int, int]] = set()

    def tiles(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = torch.einsum("tik,tjk->tij", a.double(), b.double()) + c.double()
        seen.update((int(i), int(j)) for _, i, j in (c != 0).nonzero())
        return total.to(c.dtype)

    for one in (F16, E4M3):
        seen.clear()
        count = 2 * one.rows
        a = torch.ones(count, one.depth).to(one.dtype)
        c = torch.arange(1, count + 1, dtype=torch.float32)
        assert torch.equal(spread(one, tiles)(a, a, c), c + one.depth)
        assert {i for i, _ in seen} == set(range(one.rows))
        assert {j for _, j in seen} == set(range(8))
