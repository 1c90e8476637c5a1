"""Matrix units: how one product-sum adds, per architecture and operand type, and the error bound kappa that follows.

The model is the truncated fused dot-add: a unit takes L exact products and the accumulator, aligns them to the largest
exponent, truncates each to F fraction bits, adds exactly, and converts once to p fraction bits.  A longer product is a chain.
Sources: Fasi, Higham, Mikaitis, Pranesh (2021); FTTN, arXiv 2403.00232; Khattak and Mikaitis, arXiv 2512.07004; MMA-Sim,
arXiv 2511.10909.  A CPU, and Triton's interpreter, add in fp32 with round-to-nearest in an order of their own.

The 8-bit units of sm_89 and sm_90 keep 13 fraction bits, of the accumulator too.  A kernel may *promote*: begin at zero after
so many products and add what it had to an accumulator in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """One matrix unit.  products, fraction, output: L, F and p of the module's docstring.

    operand_error: relative error of each operand before it is multiplied (tf32 drops the low 13 bits of fp32).
    flush: what an operand may lose because subnormals count as zero.
    restarts: how often the accumulator comes with fp32's 23 fraction bits although F is less, see `accumulated`.

    Of the L + 1 terms of one instruction the largest is aligned with itself and has no more than F fraction bits, so at most
    L lose anything, each less than 2**-F of the largest.  Truncation lets no partial sum grow past sum |a||b|, so the bound
    is of the first order and exact.  Zero products lose nothing, nor does an instruction that has no other.
    """

    products: int
    fraction: int
    output: int
    operand_error: float = 0.0
    flush: float = 0.0
    restarts: int = 0

    def kappa(self, n: int) -> float:
        """Bound on |computed - exact| / sum |a||b| for a product-sum of n terms with an fp32 accumulator."""
        chain = n * 2.0**-self.fraction + math.ceil(n / self.products) * 2.0**-self.output
        return chain + self.restarts * 2.0**-self.fraction + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """kappa, elementwise, of product-sums of n terms of which only `used` (fp64, any shape) are not zero, wherever."""
        chain = used * 2.0**-self.fraction + used.clamp(max=math.ceil(n / self.products)) * 2.0**-self.output
        return chain + used.clamp(max=self.restarts) * 2.0**-self.fraction + 2.0 * self.operand_error


@dataclass(frozen=True)
class NearestChain(Unit):
    """Additions (fused with their products or not) rounded to nearest, in any order: at most one product's rounding and
    n - 1 additions lie on any path, so (1 + u)^n - 1 bounds the error, u = 2**-fraction (Higham 2002, section 3.1)."""

    def kappa(self, n: int) -> float:
        return math.expm1(n * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        return torch.expm1(used * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error


@dataclass(frozen=True)
class Promoted(Unit):
    """A unit that begins at zero after `every` products, and whose sum is then added to one in fp32, to nearest.

    Each part errs by kappa(every) of its own magnitudes, and all of them together by that of the whole; the additions follow,
    of which the first, to zero, is exact.
    """

    every: int = 1

    def kappa(self, n: int) -> float:
        chain = super().kappa(min(n, self.every))
        return (1 + chain) * math.exp((math.ceil(n / self.every) - 1) * math.log1p(_U)) - 1

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        chain = super().kappas(used.clamp(max=self.every), min(n, self.every))
        return (1 + chain) * torch.exp(used.clamp(max=max(math.ceil(n / self.every) - 1, 0)) * math.log1p(_U)) - 1


_U = 2.0**-24
_FP32_FRACTION = 23
_FP32 = NearestChain(1, 24, 24)
_FP64 = NearestChain(1, 53, 53)
# Truncation of 13 of fp32's 23 fraction bits.  Two truncated operands lose less than 2 * 2**-10 of their product, and shrink
# it; two rounded ones, where a compiler adds that, err by half as much, which leaves room for the second order.
_TF32_ERROR = 2.0**-10
# Three products of a high and a low part of 11 bits each: truncation leaves 2**-20 of each operand, and so does the product
# of the low parts, which nobody forms.  Three instructions instead of one; the table counts four.
_TF32X3_ERROR = 1.5 * 2.0**-20
_TF32_FLUSH = 2.0**-136  # the quantum of tf32's subnormals: fp32's, 2**-149, without its low 13 bits

# arch -> operand type -> unit.  16-bit types share a row, and 8-bit ones an entry, "float8"; fp32 operands run on FMA pipes
# everywhere.
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
    "cpu": {"float16": _FP32, "bfloat16": NearestChain(1, 24, 24, flush=2.0**-126), "float8": _FP32},
}
_UNITS["sm_89"] = _UNITS["sm_80"] | {"float8": Unit(16, 13, 13)}
_UNITS["sm_100"] = _UNITS["sm_90"] | {"float8": Unit(32, 25, 23)}
_UNITS["sm_90"] |= {"float8": Unit(32, 13, 13)}
_SAME_AS = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_103": "sm_100", "sm_120": "sm_100"}

ARCHES = (*_UNITS, *_SAME_AS)


def unit_for(arch: str, operands: str) -> Unit:
    """The unit that multiplies `operands` on `arch` ("sm_90", "cpu"): "float16", "bfloat16", "tf32", "float8_e4m3fn"...

    An unknown arch, or a type that its table lacks, gets the most pessimistic entry of that type; see `known`.
    Raises ValueError for an operand type that no table has.
    """
    if operands == "float32":
        return _FP32
    if operands == "float64":
        return _FP64
    kind = "float8" if operands in ("float8_e4m3fn", "float8_e5m2") else operands
    row = _UNITS.get(_SAME_AS.get(arch, arch), {})
    if kind in row:
        return row[kind]
    candidates = [units[kind] for units in _UNITS.values() if kind in units]
    if not candidates:
        raise ValueError(f"no matrix unit is known for operands of type {operands!r}")
    return max(candidates, key=lambda unit: unit.kappa(1024))


def accumulated(unit: Unit, promotion: int, block: int = 0, blocks: int = 1) -> Unit:
    """The unit as a kernel uses it whose sums go over `blocks` of `block` terms each, and whose accumulator is rescaled in fp32
    between them; promotion: products after which it is added to one in fp32, 0 for never.

    A unit that keeps fp32's bits of its accumulator is returned as it is: promoted or not, it errs by no more than one chain.
    """
    if unit.fraction >= _FP32_FRACTION:
        return unit
    if not promotion:
        return replace(unit, restarts=blocks - 1)
    # Parts that do not fit into the blocks a whole number of times may run over their ends.
    restarts = 0 if blocks == 1 or block % promotion == 0 else min(math.ceil(promotion / block), blocks - 1)
    return Promoted(unit.products, unit.fraction, unit.output, unit.operand_error, unit.flush, restarts, promotion)


def known(arch: str) -> bool:
    """Whether the tables have that arch, rather than a pessimistic guess."""
    return arch in ARCHES
