"""The declared numerics of a forward that a bound is derived for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from verify.arithmetic.dtypes import DTYPES, dtype_named
from verify.variant import Maximum, Numerics
from verify.variant.numerics import leaves

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")


@lru_cache(maxsize=256)  # a campaign resolves the same declaration for every case
def check_derived(numerics: Numerics, given: str, operands: str, probability: str) -> None:
    """Raise ValueError for what no bound is derived for."""
    eight = dtype_named(given).itemsize == 1
    # What Q and K lose in a narrower format is not derived, nor what a prescaled operand or a score
    # loses to the short range of an 8-bit one; no unit multiplies 8-bit P by a wider V.  P may have
    # the other format of 8 or of 16 bits.
    size = dtype_named(given).itemsize
    either = tuple(name for name, dtype in DTYPES.items() if size <= 2 and dtype.itemsize == size)
    _require("products.operands", operands, holding(given))
    if numerics.quantised.value_top:
        either = _EIGHT_BITS
    _require("output.probability", probability, tuple(dict.fromkeys((*either, *holding(given)))))
    products, softmax, output = numerics.products, numerics.softmax, numerics.output
    alone = other_half(given, probability) and output.values == "input"
    of_scores, of_values = (
        _accumulators(operand, products.float32_products)
        for operand in (operands, "float32" if alone else probability)
    )
    into = products.score_accumulator or products.accumulator
    prescaled = ("none", "q", "sqrt") if dtype_named(operands).itemsize > 1 else ("none",)
    sums = ("unrounded",) if output.normalised else ("unrounded", "rounded", "mma", "any")
    _require("products.accumulator", products.accumulator, of_values)
    _require("products.score_accumulator", into, of_scores)
    _require("products.prescale", products.prescale, prescaled)
    _require("softmax.scores", softmax.scores, ("float32",) if eight else ("float32", "input"))
    _require("softmax.row_sum.of", softmax.row_sum.of, sums)
    if output.split_keys == "input":
        _require("output.split_keys", given, ("float16", "bfloat16", "float32"))
        _require("output.normaliser", output.normaliser, ("sum",))
    beside = {
        "output.normaliser": output.normaliser != "sum",
        "output.split_keys": bool(output.split_keys),
        "softmax.maximum.lag": softmax.maximum.lag != 0,
    }
    other = next((path for path, declared in beside.items() if declared), None)
    if softmax.maximum.parts != 0 and not output.split_keys:
        raise ValueError(
            "numerics.softmax.maximum.parts: keys have parts only beside numerics.output.split_keys"
        )
    plain = replace(softmax.maximum, lag=0.0, key_order="any", parts=0)
    for name, value in leaves(plain).items():
        if other and value != getattr(Maximum(), name):
            raise ValueError(
                f"numerics.softmax.maximum.{name}: no bound is derived beside numerics.{other}"
            )
    if not softmax.maximum.lag < math.log2(dtype_named(probability).max) - 1:
        raise ValueError(
            f"numerics.softmax.maximum.lag: no bound is derived for {softmax.maximum.lag}, which P"
            f" in {probability} lacks"
        )


def _require(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise ValueError(
            f"numerics.{name}: no bound is derived for {value!r}, only for {', '.join(possible)}"
        )


def _accumulators(operand: str, products: str) -> tuple[str, ...]:
    """Those that a product of such operands may have."""
    if dtype_named(operand).itemsize == 1:
        return ("float32", "float16")
    if operand == "float32":
        return ("float32", "bfloat16") if products == "ieee" else ("float32",)
    return ("float32", "float16", "bfloat16")


def other_half(given: str, probability: str) -> bool:
    """Whether both are formats of 16 bits, but not the same."""
    both = dtype_named(given).itemsize == dtype_named(probability).itemsize == 2
    return both and given != probability


def holding(given: str) -> tuple[str, ...]:
    """The formats into which every number of the given one converts exactly: itself and wider
    ones."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.holds(dtype_named(given)))
