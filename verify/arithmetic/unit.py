"""What a matrix unit is: how one product-sum adds, the error bounds that follow, and what only the
bits depend on.

The model is the truncated fused dot-add: a unit takes L exact products and the accumulator, aligns
them to the largest exponent, truncates each to F fraction bits, adds exactly, and converts once to
p fraction bits.  A longer product is a chain. With G = sum |a||b| over all products,

    |computed - exact| <= kappa(n) G + underflow(n) + misalignment(n, ...)    while G < domain(n).

No exact sum of some of the products exceeds H = (G + |sum ab|) / 2, and of kappa(n) = g + h, which
`Unit.split` gives, the part h is relative to H: g G + h H takes the place of kappa(n) G.

docs/arithmetic.md derives each part; `verify.arithmetic.dot` computes the model bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DTYPES, DType

_U = 2.0**-24  # unit roundoff of the fp32 additions that follow a promotion


@dataclass(frozen=True)
class Wiring:
    """What kappa does not depend on, but every bit does.

    addend: "aligned", the accumulator is one of the aligned terms; "after", the exact sum of the
    aligned products and the
        accumulator are aligned once more, to the larger of the two, and truncated to F bits.
    normalises: a subnormal operand counts with the exponent of its leading bit, not with its
    format's smallest. zero: the exponent that a product or an accumulator of zero brings to the
    alignment; None if none. order: which of an instruction's products stand in which place of its
    chain, len(order) of them; () for as they come. via: format that the operands are converted to
    before, exactly; "" for their own. zeros: "positive", an exact zero is +0, and so is a result
    too small for the format; "signed", the latter keeps its sign;
        "ieee", as "signed", but a sum of nothing except -0 is -0.
    overflow: "infinity" or "saturate", to the largest finite number. nan: "ones", every bit but the
    sign; "quiet", IEEE 754's positive quiet NaN without payload; "kept", an operand's NaN made
        quiet, and the negative quiet NaN where there was none.
    """

    addend: str = "aligned"
    normalises: bool = False
    zero: int | None = None
    order: tuple[int, ...] = ()
    via: str = ""
    zeros: str = "positive"
    overflow: str = "infinity"
    nan: str = "ones"

    def __post_init__(self) -> None:
        for name, possible in (
            ("addend", ("aligned", "after")),
            ("via", ("", *DTYPES)),
            ("zeros", ("signed", "positive", "ieee")),
            ("overflow", ("infinity", "saturate")),
            ("nan", ("ones", "quiet", "kept")),
        ):
            if getattr(self, name) not in possible:
                raise ValueError(
                    f"{name}: {getattr(self, name)!r} is none of {', '.join(map(repr, possible))}"
                )
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"order: {self.order} is no permutation")


def spilled(bound: Tensor) -> Tensor:
    """Bounds (..., rows, columns) of products by a unit that `spills`: +inf also in a row whose
    next row has one."""
    lost = bound.isinf().any(-1, keepdim=True)
    before = torch.zeros_like(lost)
    before[..., :-1, :] = lost[..., 1:, :]
    return bound.masked_fill(before, torch.inf)


@dataclass(frozen=True)
class Unit:
    """One matrix unit.  products, fraction, output: L, F and p of the module's docstring.

    operand_error: relative error of each operand before it is multiplied (tf32 drops the low 13
    bits of fp32). flush: what an operand may lose because subnormals count as zero. restarts: how
    often the accumulator comes with fp32's 23 fraction bits although F is less, see
    `mma.accumulated`. accumulator: dtype of the accumulator and of the result.  rounding: of the
    conversion to it, "zero" or "nearest" (even). spills: a row of the left operand can be
    multiplied together with the first elements of the next row, these by 0: NaN and infinity come
    into it from there (see `spilled`). source: where the entry is from.

    Of the L + 1 terms of one instruction the largest is aligned with itself and has no more than F
    fraction bits, so at most L lose anything, each less than 2**-F of the largest.  Zero products
    lose nothing, nor does an instruction that has no other.  Where the conversion truncates, no
    partial sum grows past sum |a||b|, so the bound is of the first order and exact; where it rounds
    to nearest, u = 2**-(p + 1), each of the m conversions may let the sum grow by 1 + u.
    """

    products: int
    fraction: int
    output: int
    operand_error: float = 0.0
    flush: float = 0.0
    restarts: int = 0
    accumulator: str = "float32"
    rounding: str = "zero"
    spills: bool = False
    wiring: Wiring = Wiring()
    source: str = field(default="", compare=False)

    def kappa(self, n: int) -> float:
        """Bound on |computed - exact| / sum |a||b| for a product-sum of n terms, but for what is
        absolute."""
        if self.rounding == "nearest":
            return (1 + n * 2.0**-self.fraction) * (1 + self._growth(n)) - 1
        chain = n * 2.0**-self.fraction + self._conversions(n) * 2.0**-self.output
        return chain + self.restarts * 2.0**-self.fraction + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """kappa, elementwise, of product-sums of n terms of which only `used` (fp64, any shape) are
        not zero, wherever."""
        conversions = used.clamp(max=self._conversions(n))
        if self.rounding == "nearest":
            return (1 + used * 2.0**-self.fraction) * torch.exp(
                conversions * math.log1p(2.0 ** -(self.output + 1))
            ) - 1
        chain = used * 2.0**-self.fraction + conversions * 2.0**-self.output
        return (
            chain + used.clamp(max=self.restarts) * 2.0**-self.fraction + 2.0 * self.operand_error
        )

    def split(self, n: int) -> tuple[float, float]:
        """kappa(n) in two parts, g and h: the error is at most g G + h H, where H, at most G,
        bounds the exact sum of any of the products."""
        whole = self.kappa(n)
        apart = min(2.0 * self.operand_error, whole)
        return apart, whole - apart

    def splits(self, used: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The same of `kappas`."""
        whole = self.kappas(used, n)
        apart = whole.clamp(max=2.0 * self.operand_error)
        return apart, whole - apart

    def underflow(self, n: int) -> float:
        """What a product-sum of n terms may lose below the accumulator's normal range, whatever
        their magnitudes.

        A subnormal accumulator is aligned as 2**emin, and a conversion there errs by a subnormal's
        place, or half of it.
        """
        emin, growth = DTYPES[self.accumulator].emin, 1 + self._growth(n)
        place = 2.0 ** (emin - self.output) / (2 if self.rounding == "nearest" else 1)
        return growth * (
            n * 2.0 ** (max(emin, self.wiring.zero or emin) - self.fraction)
            + self._conversions(n) * place
        )

    def threshold(self, operands: DType) -> float:
        """What the unit aligns every smaller operand of that format as, except zero; 0 if each has
        its own exponent."""
        if self.wiring.normalises:
            return 0.0
        return 2.0 ** (DTYPES[self.wiring.via] if self.wiring.via else operands).emin

    def misalignment(self, n: int, operands: DType, largest: float) -> float:
        """What alignment may cost beyond kappa where an operand of that format is subnormal;
        largest: of any |a| or |b|."""
        least = self.threshold(operands)
        return (1 + self._growth(n)) * n * 2.0**-self.fraction * least * max(largest, least)

    @property
    def group(self) -> int:
        """No more products than that are aligned with one another."""
        return self.products

    def domain(self, n: int) -> float:
        """The sum |a||b| below which no partial sum of n terms overflows the accumulator."""
        accumulator = DTYPES[self.accumulator]
        if self.rounding == "zero":
            return accumulator.max  # what is truncated overflows at the next power of two
        return accumulator.overflow / (1 + self._growth(n))

    def _conversions(self, n: int) -> int:
        """Results that are converted in a chain of n products; products dealt out by `order` occupy
        every part of it."""
        depth = len(self.wiring.order)
        if not depth:
            return math.ceil(n / self.products)
        return min(n, math.ceil(n / depth) * math.ceil(depth / self.products))

    def _growth(self, n: int) -> float:
        """(1 + u)**m - 1: how far m conversions to nearest let a sum grow; none that truncate."""
        if self.rounding == "zero":
            return 0.0
        return math.expm1(self._conversions(n) * math.log1p(2.0 ** -(self.output + 1)))


@dataclass(frozen=True)
class Envelope(Unit):
    """A bound of several ways to add, for a kernel of which it is not known, or does not matter,
    which one it takes.

    No instruction adds like this, so that it has no bits.  parts: one of these ways begins at zero
    again and again, as `Promoted` does, so that nothing of kappa is relative to H.
    """

    parts: bool = False

    def split(self, n: int) -> tuple[float, float]:
        """As `Unit.split`."""
        return (self.kappa(n), 0.0) if self.parts else super().split(n)

    def splits(self, used: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """As `Unit.splits`."""
        if not self.parts:
            return super().splits(used, n)
        whole = self.kappas(used, n)
        return whole, torch.zeros_like(whole)

    @property
    def group(self) -> int:
        """As `Unit.group`: `products` are those of the unit that converts most often; no known one
        aligns more than these."""
        return 32


@dataclass(frozen=True)
class AnyOf(Envelope):
    """Whichever of several units: each bound is that of the worst of them.

    The fields of `Unit` are those of the first.
    """

    units: tuple[Unit, ...] = ()

    @staticmethod
    def these(*units: Unit) -> AnyOf:
        """The worst of them."""
        own = {each.name: getattr(units[0], each.name) for each in fields(Unit)}
        return AnyOf(**own, parts=True, units=units)

    def kappa(self, n: int) -> float:
        return max(unit.kappa(n) for unit in self.units)

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        return torch.stack([unit.kappas(used, n) for unit in self.units]).amax(0)

    def underflow(self, n: int) -> float:
        """As `Unit.underflow`."""
        return max(unit.underflow(n) for unit in self.units)

    def threshold(self, operands: DType) -> float:
        """As `Unit.threshold`."""
        return max(unit.threshold(operands) for unit in self.units)

    def misalignment(self, n: int, operands: DType, largest: float) -> float:
        """As `Unit.misalignment`."""
        return max(unit.misalignment(n, operands, largest) for unit in self.units)

    def domain(self, n: int) -> float:
        """As `Unit.domain`."""
        return min(unit.domain(n) for unit in self.units)


@dataclass(frozen=True)
class NearestChain(Unit):
    """Additions (fused with their products or not) rounded to nearest, in any order: at most one
    product's rounding and n - 1 additions lie on any path, so (1 + u)^n - 1 bounds the error, u =
    2**-fraction (Higham 2002, section 3.1)."""

    rounding: str = "nearest"

    def kappa(self, n: int) -> float:
        return math.expm1(n * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        return torch.expm1(used * math.log1p(2.0**-self.fraction)) + 2.0 * self.operand_error

    def split(self, n: int) -> tuple[float, float]:
        """As `Unit.split`: what rounds products is relative to G, what rounds sums to H."""
        sums = math.expm1(max(n - 1, 0) * math.log1p(2.0**-self.fraction))
        return self.kappa(n) - sums, sums

    def splits(self, used: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """As `Unit.splits`."""
        sums = torch.expm1((used - 1).clamp(min=0.0) * math.log1p(2.0**-self.fraction))
        return self.kappas(used, n) - sums, sums

    def underflow(self, n: int) -> float:
        """As `Unit.underflow`: only products are rounded there, sums of subnormals are exact."""
        return (1 + self._growth(n)) * n * DTYPES[self.accumulator].smallest_subnormal / 2

    def threshold(self, operands: DType) -> float:
        """0: nothing is aligned."""
        return 0.0

    def _growth(self, n: int) -> float:
        return math.expm1(n * math.log1p(2.0**-self.fraction))


@dataclass(frozen=True)
class Promoted(Unit):
    """A unit that begins at zero after `every` products, and whose sum is then added to one in
    fp32, to nearest; with `own`, to one in the accumulator's dtype.

    Each part errs by kappa(every) of its own magnitudes, and all of them together by that of the
    whole; the additions follow, of which the first, to zero, is exact.  parts: as in `Envelope`.
    """

    every: int = 1
    own: bool = False
    parts: bool = False

    def kappa(self, n: int) -> float:
        chain = super().kappa(min(n, self.every))
        return (1 + chain) * self._later(n) - 1

    def kappas(self, used: Tensor, n: int) -> Tensor:
        """As `Unit.kappas`."""
        chain = super().kappas(used.clamp(max=self.every), min(n, self.every))
        return (1 + chain) * torch.exp(
            used.clamp(max=max(self._parts(n) - 1, 0)) * math.log1p(self._u)
        ) - 1

    def split(self, n: int) -> tuple[float, float]:
        """As `Unit.split`: each of several parts errs by its own largest partial sum, and these may
        add up to G; the additions are of sums of some of the products."""
        if self._parts(n) <= 1 and not self.parts:
            return super().split(n)
        chain, later = super().kappa(min(n, self.every)), self._later(n) - 1
        return chain, (1 + chain) * later

    def splits(self, used: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """As `Unit.splits`."""
        if self._parts(n) <= 1 and not self.parts:
            return super().splits(used, n)
        whole = self.kappas(used, n)
        chain = super().kappas(used.clamp(max=self.every), min(n, self.every))
        return chain, whole - chain

    def underflow(self, n: int) -> float:
        """As `Unit.underflow`, in every part; sums of subnormals are exact."""
        return self._later(n) * self._parts(n) * super().underflow(min(n, self.every))

    def misalignment(self, n: int, operands: DType, largest: float) -> float:
        """As `Unit.misalignment`, in every part of its own products."""
        part = min(n, self.every)
        return self._later(n) * super().misalignment(part, operands, largest) * (n / max(part, 1))

    def domain(self, n: int) -> float:
        """As `Unit.domain`: every part within the unit's, and the sum of them within that of its
        own dtype."""
        return min(super().domain(min(n, self.every)), self._total.overflow / (1 + self.kappa(n)))

    @property
    def _total(self) -> DType:
        return DTYPES[self.accumulator if self.own else "float32"]

    @property
    def _u(self) -> float:
        return self._total.unit_roundoff if self.own else _U

    def _parts(self, n: int) -> int:
        return math.ceil(n / self.every)

    def _later(self, n: int) -> float:
        return math.exp((self._parts(n) - 1) * math.log1p(self._u))
