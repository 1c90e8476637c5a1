"""Instructions on one lane's registers: ex2, lg2, rcp at special values, and cvt."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from verify.arithmetic.dtypes import DTYPES
from verify.probes.documented.states import LANES, Trials, bits_of, blank, packed, register

_X, _D = register("x[0]"), register("d[0]")
_INF, _NAN = 0x7F800000, 0x7FC00000
_SIGN = 0x80000000
_RANDOM_BITS = 1 << 14

# Tables "Subnormal, infinity and NaN" of each instruction.  Any NaN is as good as another.
_NANS = {_NAN: _NAN, _SIGN | _NAN: _NAN, _INF | 1: _NAN, 0x7FFFFFFF: _NAN}
SPECIAL = {
    "ex2.approx.ftz.f32": {
        _SIGN | _INF: 0,
        _INF: _INF,
        **dict.fromkeys((0, _SIGN, 1, _SIGN | 1, 0x007FFFFF, 0x807FFFFF), 0x3F800000),
        **_NANS,
    },
    "lg2.approx.f32": {
        0: _SIGN | _INF,
        _SIGN: _SIGN | _INF,
        _INF: _INF,
        **dict.fromkeys((_SIGN | _INF, 0xBF800000, 0x80800000), _NAN),
        **_NANS,
    },
    "rcp.approx.f32": {
        0: _INF,
        _SIGN: _SIGN | _INF,
        _INF: 0,
        _SIGN | _INF: _SIGN,
        **_NANS,
    },
}
SPECIAL_HALF = {
    0xFC00: 0,
    0: 0x3C00,
    0x8000: 0x3C00,
    0x7C00: 0x7C00,
    0x7E00: 0x7E00,
    0xFD01: 0x7E00,
}
"""ex2.approx.f16."""


def special(name: str) -> Trials:
    """Every special input of an fp32 instruction, in every lane."""
    return _results({x: (x, y) for x, y in SPECIAL[name].items()}, "float32")


def special_pairs() -> Trials:
    """Every special input of ex2.approx.f16x2, beside every other."""
    pairs = {
        x | z << 16: (x | z << 16, y | w << 16)
        for x, y in SPECIAL_HALF.items()
        for z, w in SPECIAL_HALF.items()
    }
    return _results(pairs, "float16")


def _results(wanted: Mapping[int, tuple[int, int]], nan: str) -> Trials:
    before = blank(len(wanted))
    after = before.copy()
    for trial, (x, y) in enumerate(wanted.values()):
        before.registers[trial, :, _X] = x
        after.registers[trial, :, _X] = x
        after.registers[trial, :, _D] = y
    return Trials([f"of {x:08x}" for x in wanted], before, after, nan=nan)


# "cvt": .rn rounds to nearest even.  Of two inputs a and b the result of a is stored in the upper
# half of d, that of b in the lower.  .satfinite: "if the input value is NaN, then the result is NaN
# in the specified destination format.  If the absolute value of input (ignoring sign) is greater
# than MAX_NORM of the specified destination format, then the result is sign-preserved MAX_NORM of
# the destination format".


def cvt(format: str) -> Trials:
    """Ties, their neighbours, both ends of the range, and random bits, in every place."""
    values = _inputs(format)
    places = 4 // DTYPES[format].itemsize
    columns = [np.roll(values, 7 * place) for place in range(places)]
    trials = len(values) // LANES
    before = blank(trials)
    given = np.stack(columns, -1).reshape(trials, LANES, places)
    before.registers[:, :, _X : _X + places] = given
    after = before.copy()
    after.registers[:, :, _D] = packed(_converted(given, format), 32 // places)[..., 0]
    return Trials([f"inputs {i}" for i in range(trials)], before, after, nan=format)


def widening(format: str) -> Trials:
    """Every number of a 16-bit format in both places; fp32 holds them all.  No NaN: its bits are
    not documented."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[format].torch)
    numbers = numbers[~numbers.isnan()]
    low = numbers.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    wide = numbers.to(torch.float32).view(torch.int32).numpy().view(np.uint32)
    trials = -(-len(low) // LANES)
    places = np.resize(np.arange(len(low)), trials * LANES).reshape(trials, LANES)
    others = np.roll(np.arange(len(low)), 7)[places]
    before = blank(trials)
    before.registers[:, :, _X] = low[places] | low[others] << 16
    after = before.copy()
    after.registers[:, :, _D] = wide[places]
    after.registers[:, :, _D + 1] = wide[others]
    return Trials([f"inputs {i}" for i in range(trials)], before, after)


def _converted(given: NDArray[np.uint32], format: str) -> NDArray[np.uint32]:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        exact = given.view(np.float32).astype(np.float64)
    largest = DTYPES[format].max
    saturates = DTYPES[format].itemsize == 1
    return bits_of(np.clip(exact, -largest, largest) if saturates else exact, format)


def _inputs(format: str) -> NDArray[np.uint32]:
    """fp32 bits, a multiple of 32 of them."""
    found = DTYPES[format]
    random = np.random.default_rng(9)
    least = found.emin - found.precision + 1
    top = math.frexp(found.max)[1]
    exponents = random.integers(max(least - 2, -149), top + 1, 1 << 12)
    # numbers with one bit more than the format has, or fewer, as among its subnormals
    steps = np.maximum(exponents - found.precision, least - 1)
    numbers = np.ldexp(np.round(np.ldexp(1 + random.random(1 << 12), exponents - steps)), steps)
    ends = np.array([0.0, found.max, found.overflow, 2 * found.max, math.inf, 2.0**least])
    with np.errstate(over="ignore"):
        ties = np.concatenate((numbers, ends, 2.0 ** (least - 1) * np.arange(8))).astype(np.float32)
    bits = ties.view(np.uint32)
    near = np.concatenate((bits, bits + 1, np.maximum(bits, 1) - 1))
    every = np.concatenate((near, near | _SIGN, random.integers(0, 1 << 32, _RANDOM_BITS)))
    return np.resize(every, -(-len(every) // LANES) * LANES).astype(np.uint32)
