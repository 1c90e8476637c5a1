"""Casts of inputs: every number is rounded as ml_dtypes, numpy and torch round it."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify.arithmetic import rounding
from verify.arithmetic.dtypes import DTYPES, dtype_named
from verify.arithmetic.rounding import cast

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def patterns(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """Bit patterns of a tensor, as unsigned integers."""
    size = tensor.element_size()
    signed = tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    )
    return signed.numpy().view(f"u{size}")


def assert_same_numbers(got: Tensor, expected: NDArray[np.generic]) -> None:
    """Bit for bit, but any NaN for any NaN."""
    bits = expected.view(f"u{expected.dtype.itemsize}")
    nan = np.isnan(expected.astype(np.float64))
    assert np.array_equal(np.isnan(got.double().numpy()), nan)
    differ = (patterns(got) != bits) & ~nan
    assert not differ.any(), (got.double().numpy()[differ][:5], expected[differ][:5])


def hard_values(name: str) -> NDArray[np.float64]:
    """Every number of the format, every midpoint of neighbours, each of them one float64 ulp lower
    and higher."""
    fmt = dtype_named(name)
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = (
            np.arange(1 << (8 * fmt.itemsize), dtype=f"u{fmt.itemsize}")
            .view(NUMPY[name])
            .astype(np.float64)
        )
    finite = np.unique(numbers[np.isfinite(numbers)])
    midpoints = (finite[1:] + finite[:-1]) / 2
    edges = np.array(
        [
            fmt.overflow,
            2 * fmt.max,
            1e300,
            2.0**-1074,
            fmt.smallest_subnormal / 2,
            fmt.smallest_subnormal / 4,
        ]
    )
    values = np.concatenate([finite, midpoints, edges, -edges])
    near = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    return np.concatenate([near, [0.0, -0.0, np.inf, -np.inf, np.nan]])


@pytest.mark.parametrize("name", NARROW)
def test_cast_rounds_every_number_midpoint_and_neighbour_as_ml_dtypes_does(name: str) -> None:
    values = hard_values(name)
    with np.errstate(all="ignore"):
        expected = _straight(values, name)
    assert_same_numbers(cast(values, dtype_named(name)), expected)


def _straight(values: NDArray[np.float64], name: str) -> NDArray[np.generic]:
    """ml_dtypes goes from float64 through float32, which rounds twice: round to odd in float32
    first, which makes it right."""
    if name == "float16":
        return values.astype(np.float16)
    near = values.astype(np.float32)
    inexact = (near.astype(np.float64) != values) & np.isfinite(values)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    toward = np.where(inexact & away, np.nextafter(near, np.float32(0)), near)
    odd = np.where(inexact, toward.view(np.uint32) | 1, toward.view(np.uint32)).astype(np.uint32)
    return odd.view(np.float32).astype(NUMPY[name])


@pytest.mark.parametrize("name", [*NARROW, "float32"])
def test_cast_rounds_random_numbers_as_the_libraries_do(name: str) -> None:
    words = np.random.Philox(key=17, counter=0).random_raw(400_000)
    fmt = dtype_named(name)
    # beyond both ends
    exponent = 1023 + fmt.emin - 60 + (words >> np.uint64(20)) % np.uint64(120 + 2 * -fmt.emin)
    spread = (words & np.uint64(0x800FFFFFFFFFFFFF)) | (np.minimum(exponent, 2046) << np.uint64(52))
    for bits in (words, spread):
        values = bits.view(np.float64)
        with np.errstate(all="ignore"):
            expected = values.astype(np.float32) if name == "float32" else _straight(values, name)
        assert_same_numbers(cast(values, fmt), expected)


def test_cast_agrees_with_torch_from_float32() -> None:
    """torch's own casts to the 16-bit formats, on values that float32 holds."""
    values = np.random.Philox(key=18, counter=0).random_raw(200_000).view(np.float32)
    values = values[np.isfinite(values)]
    for name in ("float16", "bfloat16"):
        expected = torch.from_numpy(values).to(getattr(torch, name))
        assert np.array_equal(
            patterns(cast(values.astype(np.float64), DTYPES[name])), patterns(expected)
        )


def test_cast_never_saturates() -> None:
    past = {
        name: cast(np.array([dtype.overflow, -dtype.overflow, 1e300]), dtype)
        for name, dtype in DTYPES.items()
    }
    for name in ("float16", "bfloat16", "float8_e5m2"):
        assert past[name].double().tolist() == [math.inf, -math.inf, math.inf]
    assert cast(np.array([448.0, 464.0, -448.0]), DTYPES["float8_e4m3fn"]).double().tolist() == [
        448.0,
        448.0,
        -448.0,
    ]
    assert cast(np.array([464.1, 480.0, math.inf]), DTYPES["float8_e4m3fn"]).double().isnan().all()


def test_cast_gives_one_nan() -> None:
    """Positive and quiet, as numpy's is in every format that has infinity."""
    words = [0x7FF8 << 48, 0xFFF8 << 48, (1 << 64) - 1, (0x7FF << 52) + 1]
    given = np.array([*words, 0, 1], dtype=np.uint64).view(np.float64)
    quiet = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
    quiet |= {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
    for name, expected in quiet.items():
        found = patterns(cast(given, dtype_named(name)))
        assert found.tolist() == [expected] * 4 + [0, 0]


def test_cast_keeps_shape_and_leaves_float64_alone() -> None:
    values = np.linspace(-1, 1, 24).reshape(2, 3, 4)[:, ::-1]
    assert np.array_equal(cast(values, DTYPES["float64"]).numpy(), values)
    assert cast(values, DTYPES["bfloat16"]).shape == (2, 3, 4)
    assert cast(np.empty((2, 0, 4)), DTYPES["float16"]).shape == (2, 0, 4)


def test_a_cast_that_sees_no_range_rounds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.Philox(key=19, counter=0).random_raw(100_000).view(np.float64)
    values = np.concatenate([words, *(hard_values(name) for name in NARROW[2:])])
    for dtype in DTYPES.values():
        usual = patterns(cast(values, dtype))
        with monkeypatch.context() as patch:
            patch.setattr(rounding, "seen_range", lambda magnitude: (0, (1 << 63) - 1))
            assert np.array_equal(patterns(cast(values, dtype)), usual)
