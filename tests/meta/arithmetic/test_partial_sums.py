"""kappa in two parts, g G + h H: sums in any order stay inside, nearly reach it, and no unit that a
kernel may have is bounded by less than its own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.meta.arithmetic.test_mma_climbing import climb, error_and_bound
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.mma import Unit, accumulated, unit_for
from verify.arithmetic.units import BFLOAT16_SUMS, FMA32, UNITS


def split_bound(a: Tensor, b: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
    """As `error_and_bound`, with what is relative to partial sums."""
    error, bound = error_and_bound(a, b, unit)
    products, n = a.double() * b.double(), a.shape[-1]
    used = (products != 0).sum(-1).double()
    of_sizes, of_sums = unit.splits(used, n)
    size = products.abs().sum(-1)
    half = (size + products.sum(-1).abs()) / 2
    absolute = bound - unit.kappas(used, n) * size
    return error, of_sizes * size + of_sums * half + absolute


@pytest.mark.parametrize(
    ("arch", "kind", "accumulator"),
    [
        ("sm_70", "float16", "float32"),
        ("sm_80", "bfloat16", "float32"),
        ("sm_90", "float16", "float32"),
        ("sm_90", "float16", "float16"),
        ("sm_89", "float8_e4m3fn", "float32"),
    ],
)
def test_no_sum_found_by_climbing_exceeds_the_bound_of_partial_sums(
    arch: str, kind: str, accumulator: str
):
    assert climb(unit_for(arch, kind, accumulator), kind, split_bound) > 0.2


@pytest.mark.parametrize("addend", ["aligned", "after"])
def test_of_either_wiring(addend: str):
    unit = unit_for("sm_80", "float16")
    climb(replace(unit, wiring=replace(unit.wiring, addend=addend)), "float16", split_bound)


def returning(unit: Unit, kind: str) -> tuple[Tensor, Tensor]:
    """Operands of a sum that returns to zero: half of the sizes is reached on the way, and what is
    cut beside it is all of one sign."""
    dtype, top = dtype_named(kind), 2.0**8
    tail = (1 - dtype.unit_roundoff) * top * 2.0**-unit.fraction
    cut = tail * 2.0 ** (unit.fraction - unit.output)
    group = [cut, *[tail] * (unit.products - 1)]
    row = [top, *group[1:], *group * 8, -top, *[0.0] * (unit.products - 1)]
    places = [2.0 ** math.floor(math.log2(abs(x) or 1.0) / 2) for x in row]
    a, b = torch.tensor([places]), torch.tensor([row]) / torch.tensor([places])
    return a.to(dtype.torch), b.to(dtype.torch)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [("sm_80", "bfloat16"), ("sm_90", "float16"), ("sm_90", "float8_e4m3fn")],
)
def test_a_sum_that_returns_to_zero_nearly_reaches_it(arch: str, kind: str):
    """A unit of one bit less is inside kappa G, and is seen by g G + h H."""
    unit = unit_for(arch, kind)
    error, bound = split_bound(*returning(unit, kind), unit)
    assert 0.7 <= float(error / bound) <= 1
    fewer = replace(unit, fraction=unit.fraction - 1, output=min(unit.output, unit.fraction - 1))
    operands = returning(fewer, kind)
    error, _ = error_and_bound(*operands, fewer)
    _, whole = error_and_bound(*operands, unit)
    _, bound = split_bound(*operands, unit)
    assert float(bound) < float(error) < float(whole)


def tree_sum(products: np.ndarray, rng: np.random.Generator, fused: bool) -> np.ndarray:
    """fp32 sums along the last dimension in a random order, one addition of two parts at a time;
    fused: a chain of products that are not rounded alone."""
    if fused:
        total = np.zeros(products.shape[0], dtype=np.float32)
        for j in rng.permutation(products.shape[1]):
            total = (total.astype(np.float64) + products[:, j]).astype(np.float32)
        return total
    parts = [products[:, j].astype(np.float32) for j in range(products.shape[1])]
    while len(parts) > 1:
        i, j = sorted(rng.choice(len(parts), 2, replace=False))
        parts[i] = parts[i] + parts.pop(j)
    return parts[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 48])
def test_sums_to_nearest_in_any_order(n: int, fused: bool):
    """Products of 24 bits, signs at random and in two halves that cancel."""
    rng, worst = np.random.default_rng(n + fused), 0.0
    for _ in range(30):
        a, b = (
            rng.standard_normal((200, n)).astype(np.float16).astype(np.float32) for _ in range(2)
        )
        products = (a * b).astype(np.float32).astype(np.float64)
        products *= 1 + 2.0**-25  # what a product in fp32 rounds
        if n > 2:
            products[100:, n // 2 :] = -np.abs(products[100:, n // 2 :])
            products[100:, : n // 2] = np.abs(products[100:, : n // 2])
        size, exact = np.abs(products).sum(-1), products.sum(-1)
        of_sizes, of_sums = FMA32.split(n)
        bound = of_sizes * size + of_sums * (size + np.abs(exact)) / 2
        error = np.abs(tree_sum(products, rng, fused).astype(np.float64) - exact)
        assert (error <= bound).all()
        worst = max(worst, float((error / bound).max()))
    assert worst > (0.03 if n > 7 else 0.3)


@pytest.mark.for_ci
def test_both_parts_are_kappa():
    used = torch.tensor([0.0, 1.0, 5.0, 100.0], dtype=torch.float64)
    for rows in UNITS.values():
        for row in rows.values():
            for unit in {*row.values(), *(accumulated(each, 32) for each in row.values())}:
                assert sum(unit.split(100)) == pytest.approx(unit.kappa(100), rel=1e-12)
                of_sizes, of_sums = unit.splits(used, 100)
                torch.testing.assert_close(of_sizes + of_sums, unit.kappas(used, 100))
                assert bool((of_sizes >= 0).all())
                assert bool((of_sums >= -1e-18).all())
                for part, whole in zip((of_sizes, of_sums), unit.split(100), strict=True):
                    assert float(part[-1]) == pytest.approx(whole, rel=1e-9, abs=1e-18)
    assert BFLOAT16_SUMS.split(1)[1] == 0


def test_the_unit_of_an_undeclared_instruction_bounds_all_instructions():
    """Wherever H is, from half of G to G."""
    for rows in UNITS.values():
        for arch, row in rows.items():
            for name, unit in row.items():
                if name.startswith("mma.sync."):
                    continue
                for n in (1, 16, 48, 64, 1000):
                    for half in (0.5, 1.0):
                        (g, h), (most_g, most_h) = unit.split(n), row[""].split(n)
                        assert g + half * h <= (most_g + half * most_h) * (1 + 1e-12), (arch, name)
