"""Sums to nearest in predictions: what any order rounds stays within the predicted variance, honest
fp32 kernels pass, and faults of a few parts in a million are seen after some hundred rows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness import emulation
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulated_campaigns import (
    EAGER,
    SHAPES,
    SQUARE,
    Change,
    backwards,
    forwards,
    problems,
)
from tests.harness.emulation import Kernel, Luck
from tests.harness.emulation_backward import BackwardKernel
from tests.meta.arithmetic.test_partial_sums import tree_sum
from verify.arithmetic.mma import unit_for
from verify.arithmetic.units import FMA32
from verify.problem import Problem
from verify.statistics.gradients import Given, predictions
from verify.statistics.rows import rounded_sums, shuffled_sums
from verify.tolerance.gradients_arithmetic import resolve
from verify.variant import Config

FMA = Kernel("fp32 by FMA", flat_numerics(block_n=32, scale_roundings=3), dtypes=("float32",))
CPU = Kernel("CPU", flat_numerics(block_n=64), "cpu", dtypes=("float32",))
BACKWARD = BackwardKernel("fp32", flat_gradients(block_m=16, block_n=32), FMA, dtypes=("float32",))


@pytest.mark.parametrize("order", ["chain", "tree", "large first"])
@pytest.mark.parametrize("trend", [0.0, 1.0])
def test_the_variance_of_sums_in_any_order(order: str, trend: float) -> None:
    """4000 sums of 48 products of fp32 numbers, some products far larger than others."""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((4000, 48)).astype(np.float32) for _ in range(2))
    a[:, :3] *= 30
    b = np.where(trend > 0, np.abs(b) * np.sign(a), b)
    products = a.astype(np.float64) * b
    if order == "large first":
        total = np.zeros(len(products), dtype=np.float32)
        for j in range(48):
            total = total + products[:, j].astype(np.float32)
    else:
        total = tree_sum(products, rng, order == "chain")
    exact, squares = products.sum(-1), (products**2).sum(-1)
    variance = rounded_sums(FMA32, 48.0, torch.from_numpy(exact), torch.from_numpy(squares))
    z = (total.astype(np.float64) - exact) / variance.sqrt().numpy()
    assert 0.1 < float((z**2).mean()) ** 0.5 < 1
    assert abs(float(z.mean())) < 0.05
    assert abs(float((z * np.sign(exact)).mean())) < 0.05


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("trend", [0.0, 1.0])
def test_the_variance_of_sums_whose_terms_lie_in_no_order(chain: bool, trend: float) -> None:
    """4000 sums of 48 products, some of which are far larger than others, wherever they lie."""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((4000, 48)).astype(np.float32) for _ in range(2))
    a = np.where(rng.random(a.shape) < 1 / 16, 30 * a, a)
    b = np.where(trend > 0, np.abs(b) * np.sign(a), b)
    products = a.astype(np.float64) * b
    total = tree_sum(products, rng, chain)
    exact, squares = (torch.from_numpy(x.sum(-1)) for x in (products, products**2))
    variance = shuffled_sums(FMA32, 48.0, exact, squares)
    z = (torch.from_numpy(total).double() - exact) / variance.sqrt()
    assert 0.2 < float(z.square().mean().sqrt()) < 1
    assert (variance < rounded_sums(FMA32, 48.0, exact, squares)).all()


def test_other_units_have_no_such_variance() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    for variance_of in (rounded_sums, shuffled_sums):
        assert not variance_of(unit_for("sm_90", "float16"), 48.0, ones, ones).any()


@pytest.mark.parametrize(
    "kernel", [FMA, CPU, EAGER.but(name="normalised")], ids=lambda kernel: kernel.name
)
def test_honest_forwards_stay_inside(kernel: Kernel) -> None:
    found = forwards(kernel, problems("float32", SHAPES, 1))
    assert found.failing() == set()
    assert 0.1 < found.pools["out"].rms < 0.5
    assert 0.1 < found.pools["out"].weighed < 0.5
    assert found.pools["out"].slack < 0.5  # more is random than has one sign
    assert abs(found.pools["out"].mean) < 0.02


SMALLER = FMA.but(name="blocks of 16", block_n=16)


@pytest.mark.first_look(4)
@pytest.mark.parametrize("errors", ["O", "V", "up", "down", "random"])
@pytest.mark.parametrize("kernel", [FMA, CPU, SMALLER], ids=lambda kernel: kernel.name)
def test_exponentials_at_their_limits_stay_inside(
    kernel: Kernel, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All exponentials, of rescales too, and divisions off by all that they may be."""
    real = emulation.emulate
    monkeypatch.setattr(
        emulation, "emulate", lambda problem, kernel: real(problem, kernel, Luck.AGAINST)
    )
    unlucky = kernel.but(name=f"{kernel.name}, {errors}", errors=errors)
    found = forwards(unlucky, problems("float32", SHAPES, 1))
    assert found.failing() == set()
    assert found.pools["out"].weighed < 0.75


class _Noisy(emulation.Emulation):
    """Each key's exponential is off by `strength` of itself, up or down."""

    strength = 0.0

    def exp2(self, y: Tensor, sign: Tensor | float, rescale: bool = False) -> Tensor:
        value = super().exp2(y, sign, rescale)
        if rescale:
            return value
        draw = torch.Generator().manual_seed(value.numel() + self.problem.seed)
        up = torch.randint(2, value.shape, generator=draw).double() * 2 - 1
        return (value.double() * (1 + self.strength * up)).float()


@pytest.mark.parametrize(("strength", "seen"), [(1.2e-6, True), (4e-7, False)])
def test_noise_of_single_exponentials(
    strength: float, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """576 rows.  The mean over all elements alike is far from its limit: V with a mean hides it."""
    monkeypatch.setattr(emulation, "Emulation", _Noisy)
    monkeypatch.setattr(_Noisy, "strength", strength)
    noisy = FMA.but(name=f"noisy by {strength}")
    found = forwards(noisy, problems("float32", SHAPES, 1), FMA).pools["out"]
    assert [name for name, *_ in found.excesses] == ["weighed"] * seen
    assert found.rms < 0.75 * found.rms_limit


def test_honest_backwards_stay_inside() -> None:
    found = backwards(BACKWARD, problems("float32", SQUARE, 1))
    assert found.failing() == set()
    for pool in found.pools.values():
        assert 0.05 < pool.rms < 0.5
        assert pool.slack < 0.3
        assert abs(pool.toward) < 0.05


def test_an_error_of_d_is_in_every_key_and_its_own_in_every_row() -> None:
    """K is the same in all keys, so that dQ is nothing but errors, and that of D the largest."""
    problem = Problem(seqlen_q=64, seqlen_kv=4096, head_dim=32, dtype="float32")
    draw = torch.Generator().manual_seed(3)
    v, dout = (torch.randn(1, n, 32, generator=draw).double() for n in (4096, 64))
    v += 1  # so that O is, and with it D
    k = torch.full((1, 4096, 32), 3.0, dtype=torch.float64)
    out = v.mean(1, keepdim=True).expand(1, 64, 32).float().double()
    lse = torch.full((1, 64, 1), math.log(4096), dtype=torch.float64)
    given = Given(torch.zeros_like(dout), k, v, dout, out, lse)
    arithmetic = resolve(BACKWARD.numerics, Config(), problem, BACKWARD.arch)
    _, predicted = predictions(problem, given, arithmetic, torch.arange(64), torch.arange(4096))[
        "dq"
    ]
    products, delta = (dout * out).float(), torch.zeros(1, 64)
    for feature in range(32):
        delta = delta + products[..., feature]
    off = delta.double() - (dout * out).sum(-1)
    error = problem.scale * off[..., None] * 3.0
    z = error / (predicted.sigma + predicted.allowance)
    assert 0.1 < float(z.square().mean().sqrt()) < 1


def larger(strength: float) -> Change:
    return lambda got, exact, predicted: got + strength * exact


def test_results_too_large_by_a_few_parts_in_a_million() -> None:
    """Some 550 rows each.  None is seen if all that sums round could have one sign."""
    for strength, seen in ((7e-7, {"out"}), (2e-7, set())):
        found = forwards(FMA, problems("float32", SHAPES, 1), change=larger(strength))
        assert found.failing() - {"lse"} == seen
    for strength, seen in ((1.7e-6, {"dq", "dk", "dv"}), (1.1e-6, {"dv"}), (4e-7, set())):
        asked = problems("float32", SQUARE, 1)
        assert backwards(BACKWARD, asked, change=larger(strength)).failing() == seen


def test_a_coarser_sum_is_seen() -> None:
    """Errors ten times as large, as of sums of 21 bits, and far inside the hard bound."""
    found = forwards(
        FMA,
        problems("float32", SHAPES, 1),
        change=lambda got, exact, predicted: exact + 10 * (got - exact),
    )
    assert "out" in found.failing()
    assert found.r < 1
    assert replace(FMA, fault="") == FMA
