"""Emulated sums of products, vectorised and cut into parts that caches hold, against other
calculations of the same, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness import emulated_sums
from tests.harness.emulated_sums import fused_dot, least_exponent, to_half
from verify.arithmetic.dot import fused_dot as exact_dot
from verify.arithmetic.mma import unit_for
from verify.arithmetic.unit import Unit

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(shape: tuple[int, ...], kind: str, places: int, seed: int) -> Tensor:
    """Operands as stored, of many sizes, some of them 0."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=made)
    x *= torch.exp2(torch.randint(-places, 1, shape, generator=made).float())
    x = torch.where(torch.rand(shape, generator=made) < 0.2, 0.0, x)
    return x.to(getattr(torch, kind))


@pytest.mark.parametrize(
    ("arch", "kind", "sums"),
    [
        ("sm_70", "float16", "float32"),
        ("sm_80", "bfloat16", "float32"),
        ("sm_90", "float16", "float32"),
        ("sm_90", "float16", "float16"),
    ],
)
@pytest.mark.parametrize("shape", [(3, 7, 20, 5), (2, 5, 33, 9), (1, 1, 1, 1), (2, 40, 8, 3)])
@pytest.mark.parametrize("part", [1, 1 << 18])
def test_products_are_added_as_the_unit_adds_them(
    arch: str,
    kind: str,
    sums: str,
    shape: tuple[int, int, int, int],
    part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows longer and shorter than columns, and all heads at once or one after the other."""
    monkeypatch.setitem(emulated_sums._PART, "cpu", part)
    unit, (heads, rows, terms, columns) = unit_for(arch, kind, sums), shape
    assert isinstance(unit, Unit)
    for seed, places in enumerate((1, 8, 20)):
        a = drawn((heads, rows, terms), kind, places, seed)
        b = drawn((heads, terms, columns), kind, places, seed + 10)
        start = drawn((heads, rows, columns), sums, 2 * places, seed + 20)
        got = fused_dot(a.float(), b.float(), unit, start.float(), least_exponent(unit, kind))
        x, y = torch.broadcast_tensors(a[:, :, None], b.mT[:, None])
        want = exact_dot(x, y, start, unit)
        assert torch.equal(got, want.float())


def test_no_heads_rows_or_terms() -> None:
    unit = unit_for("sm_90", "float16", "float32")
    assert isinstance(unit, Unit)
    for heads, rows, terms in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        got = fused_dot(torch.ones(heads, rows, terms), torch.ones(heads, terms, 5), unit)
        assert torch.equal(got, torch.zeros(heads, rows, 5))


def test_halves_are_rounded_once() -> None:
    """Beside ties, where a rounding to fp32 before would make one, and at the ends of the range."""
    halves = torch.arange(0, 0x7BFF, dtype=torch.int16).view(torch.float16)
    ties = (halves.double() + torch.roll(halves, -1).double())[:-1] / 2
    ends = [65504.0, 65519.999, 65520.0, 1e300, 2.0**-24, 2.0**-25, 2.0**-26, 5e-324, torch.inf]
    x = torch.cat([ties, ties * (1 + 2.0**-45), ties * (1 - 2.0**-45), torch.tensor(ends).double()])
    x = torch.cat([x, torch.tensor([2.0**-25 * (1 + 2.0**-40)], dtype=torch.float64)])
    with np.errstate(over="ignore"):
        want = torch.from_numpy(x.numpy().astype(np.float16))
    assert torch.equal(to_half(x), want.float())
    assert torch.equal(to_half(-x), -want.float())
    assert bool(to_half(torch.tensor([torch.nan], dtype=torch.float64)).isnan())
