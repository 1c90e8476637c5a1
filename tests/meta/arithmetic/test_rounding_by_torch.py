"""Rounding by torch, which a judge uses on every element, gives what rounding by integers does."""

from __future__ import annotations

import pytest
import torch

from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.rounding import cast, nearest, power_of_two


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_nearest_is_the_cast_by_integers(name: str) -> None:
    """Any exponent, every kind of tie, zeros, infinities, and what is next to the largest number:
    rounded once, where torch's own conversion of fp64 rounds twice."""
    output = DTYPES[name]
    made = torch.Generator().manual_seed(11)
    exponents = torch.randint(output.emin - 30, 140, (20000,), generator=made)
    fractions = 1 + torch.rand(20000, dtype=torch.float64, generator=made)
    places = torch.randint(0, 4096, (20000,), generator=made).double() / 4096  # ties in 11 bits
    near = 2.0 ** -(output.precision - 1)
    ends = [output.max * (1 + side * near / 4) for side in (0, 1, 0.999, 1.001, 2)]
    edges = torch.tensor([0.0, torch.inf, 1e300, 5e-324, *ends], dtype=torch.float64)
    once = 1 + near / 2 + 2.0**-40  # twice: first to a tie, then to even
    x = torch.cat([fractions * power_of_two(exponents), 1 + places, edges, torch.tensor([once])])
    x = torch.cat([x, -x])
    want, got = cast(x.numpy(), output), nearest(x, output)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert bool(nearest(torch.tensor([torch.nan], dtype=torch.float64), output).isnan())
