"""What nothing rounds where the weights of a row are known beforehand: sums of ones, and sums of
which one key has all the weight.

The derivation is docs/tolerance.md, *Exact sums*.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.unit import AnyOf, Unit
from verify.tolerance.arithmetic import ForwardArithmetic

_ROW_SUM = 2**24  # integers below that are exact in fp32


@dataclass(frozen=True)
class ExactUnit(Unit):
    """A unit that rounds no product or sum of these operands: see `exact_below`."""

    def kappa(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """Return 0 for each element."""
        return torch.zeros_like(used)

    def underflow(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def misalignment(self, n: int, operands: object, largest: float) -> float:
        """Return 0."""
        return 0.0


def exact_unit(unit: Unit) -> ExactUnit:
    """The same unit for operands whose products and sums it does not round."""
    own = {field.name: getattr(unit, field.name) for field in fields(Unit)}
    return ExactUnit(**(own | {"operand_error": 0.0, "flush": 0.0, "restarts": 0}))


def exact_below(unit: Unit) -> float:
    """Return the limit below which a sum of magnitudes of integers is exact, in any order.

    Below it, F fraction bits of the largest term reach down to 1, and so do the p + 1 bits of a
    result.
    """
    if isinstance(unit, AnyOf):
        return min(map(exact_below, unit.units))
    return 2.0 ** min(unit.fraction, unit.output + 1)


def of_ones(a: ForwardArithmetic, keys: int, arch: str) -> ForwardArithmetic | None:
    """The arithmetic of a problem whose scores are all 0 and whose V holds 0 and 1, times one
    factor, for at most so many keys; None where exp(0) is not known to be 1, or V is rounded.

    A P that is divided before its product, or made of an LSE, is not 1: then only the row sum is
    exact.  The exponentials of a merge keep their error, for they are not of 0.
    """
    functions = (a.exponential, a.rescale)
    known = all(function.one_at_zero for function in functions)
    if a.probability_scale != 1:  # which may be the exponent's, an integer
        known = all(arch in function.exact_at_integers for function in functions)
    if not known or a.excess or a.columns or keys >= _ROW_SUM:
        return None
    found = replace(a, ones=True)
    if a.normalised or a.by_lse or keys >= exact_below(a.values):
        return None if a.sums_by_unit else found
    exact = exact_unit(a.values)
    float32 = dtype_named("float32")
    return replace(found, values=exact, probability=float32, probability_scale=1.0, conversion=None)


def of_one_key(a: ForwardArithmetic) -> ForwardArithmetic:
    """The arithmetic of a problem in which every row has one key whose weight is not 0 at the end:
    nothing else is rounded in its sums but what the key's own weight and product are."""
    return replace(a, one_key=True)
