"""Matrix units: how one product-sum adds, per architecture and operand type, and the error bound kappa that follows.

The model is the truncated fused dot-add: a unit takes L exact products and the accumulator, aligns them to the largest
exponent, truncates each to F fraction bits, adds exactly, and converts once to p fraction bits.  A longer product is a chain.
Sources: Fasi, Higham, Mikaitis, Pranesh (2021); FTTN, arXiv 2403.00232; Khattak and Mikaitis, arXiv 2512.07004; MMA-Sim,
arXiv 2511.10909.  A CPU, and Triton's interpreter, add in fp32 with round-to-nearest in an order of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """One matrix unit.  products, fraction, output: L, F and p of the module's docstring.

    operand_error: relative error of each operand before it is multiplied (tf32 drops the low 13 bits of fp32).
    flush: what an operand may lose because subnormals count as zero.

    Of the L + 1 terms of one instruction the largest is aligned with itself and has no more than F fraction bits, so at most
    L lose anything, each less than 2**-F of the largest.  Truncation lets no partial sum grow past sum |a||b|, so the bound
    is of the first order and exact.  Zero products lose nothing, nor does an instruction that has no other.
    """

    products: int
    fraction: int
    output: int
    operand_error: float = 0.0
    flush: float = 0.0

    def kappa(self, n: int) -> float:
        """Bound on |computed - exact| / sum |a||b| for a product-sum of n terms with an fp32 accumulator."""
        return n * 2.0**-self.fraction + math.ceil(n / self.products) * 2.0**-self.output + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """kappa, elementwise, of product-sums of n terms of which only `used` (fp64, any shape) are not zero, wherever."""
        instructions = used.clamp(max=math.ceil(n / self.products))
        return used * 2.0**-self.fraction + instructions * 2.0**-self.output + 2.0 * self.operand_error


@dataclass(frozen=True)
class NearestChain(Unit):
    """Additions (fused with their products or not) rounded to nearest, in any order: at most one product's rounding and
    n - 1 additions lie on any path, so (1 + u)^n - 1 bounds the error, u = 2**-fraction (Higham 2002, section 3.1)."""

    def kappa(self, n: int) -> float:
        return math.expm1(n * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        return torch.expm1(used * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error


_FP32 = NearestChain(1, 24, 24)
_FP64 = NearestChain(1, 53, 53)
# Truncation of 13 of fp32's 23 fraction bits.  Two truncated operands lose less than 2 * 2**-10 of their product, and shrink
# it; two rounded ones, where a compiler adds that, err by half as much, which leaves room for the second order.
_TF32_ERROR = 2.0**-10
# Three products of a high and a low part of 11 bits each: truncation leaves 2**-20 of each operand, and so does the product
# of the low parts, which nobody forms.  Three instructions instead of one; the table counts four.
_TF32X3_ERROR = 1.5 * 2.0**-20
_TF32_FLUSH = 2.0**-136  # the quantum of tf32's subnormals: fp32's, 2**-149, without its low 13 bits

# arch -> operand type -> unit.  16-bit types share a row; fp32 operands run on FMA pipes everywhere.
_UNITS: dict[str, dict[str, Unit]] = {
    "sm_70": {"float16": Unit(4, 23, 23)},
    "sm_75": {"float16": Unit(4, 24, 23)},
    "sm_80": {
        "float16": Unit(8, 24, 23),
        "bfloat16": Unit(8, 24, 23),
        "tf32": Unit(4, 24, 23, _TF32_ERROR, _TF32_FLUSH),
        "tf32x3": Unit(1, 22, 23, _TF32X3_ERROR, _TF32_FLUSH),
    },
    "sm_90": {
        "float16": Unit(16, 25, 23),
        "bfloat16": Unit(16, 25, 23),
        "tf32": Unit(8, 25, 23, _TF32_ERROR, _TF32_FLUSH),
        "tf32x3": Unit(2, 23, 23, _TF32X3_ERROR, _TF32_FLUSH),
    },
    # AVX-512's bfloat16 dot product, which torch's matmul uses where it can, takes subnormals as zero (Intel SDM, VDPBF16PS).
    "cpu": {"float16": _FP32, "bfloat16": NearestChain(1, 24, 24, flush=2.0**-126)},
}
_SAME_AS = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_89": "sm_80", "sm_100": "sm_90", "sm_103": "sm_90", "sm_120": "sm_90"}

ARCHES = (*_UNITS, *_SAME_AS)


def unit_for(arch: str, operands: str) -> Unit:
    """The unit that multiplies `operands` ("float16", "bfloat16", "tf32", "float32", "float64") on `arch` ("sm_90", "cpu").

    An unknown arch, or a type that its table lacks, gets the most pessimistic entry of that type; see `known`.
    Raises ValueError for an operand type that no table has.
    """
    if operands == "float32":
        return _FP32
    if operands == "float64":
        return _FP64
    row = _UNITS.get(_SAME_AS.get(arch, arch), {})
    if operands in row:
        return row[operands]
    candidates = [units[operands] for units in _UNITS.values() if operands in units]
    if not candidates:
        raise ValueError(f"no matrix unit is known for operands of type {operands!r}")
    return max(candidates, key=lambda unit: unit.kappa(1024))


def known(arch: str) -> bool:
    """Whether the tables have that arch, rather than a pessimistic guess."""
    return arch in ARCHES
