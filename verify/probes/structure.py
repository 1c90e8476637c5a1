"""Measures how a matrix instruction adds: groups, alignment, conversion, accumulator, subnormals.

Each quantity is measured by sums whose results determine it, and is written as text.  So the
quantities of a device and of the model, from the same experiments, can be compared directly.
docs/probes.md derives the experiments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from verify.probes.instructions import TF32
from verify.probes.lab import Lab, Sum, UnrepresentableError, representable
from verify.probes.summation import Summation

UNKNOWN = "not measurable"

# The values, in units in the last place, that -1.5, -0.5, 0.5 and 1.5 are rounded to -> the name.
_ROUNDINGS: dict[tuple[float, ...], str] = {
    (-1.0, 0.0, 0.0, 1.0): "toward zero",
    (-2.0, 0.0, 0.0, 2.0): "to nearest, ties to even",
    (-2.0, -1.0, 1.0, 2.0): "to nearest, ties away",
    (-2.0, -1.0, 0.0, 1.0): "down",
    (-1.0, 0.0, 1.0, 2.0): "up",
}
_HALVES = (-1.5, -0.5, 0.5, 1.5)


def measure(lab: Lab) -> dict[str, str]:
    """Quantity -> measured value as text; the same keys for every instruction of a kind."""
    return _Structure(lab, Summation(lab)).quantities()


@dataclass(frozen=True)
class _Structure:
    lab: Lab
    summation: Summation

    def quantities(self) -> dict[str, str]:
        experiments = {
            "fraction bits F": self._fraction_in_words,
            "alignment": self._alignment,
            "output bits p": self._output_in_words,
            "output rounding": self._rounding,
            "bits of C beside a product": self._bits_of_c,
            "rounding of C + product": self._rounding_of_c,
            "bits of C alone": self._bits_of_c_alone,
            "subnormal operands": self._subnormal_operands,
            "their alignment": self._normalises,
            "subnormal C": self._subnormal_c,
            "subnormal results": self._subnormal_results,
        }
        if self.lab.operands is TF32:
            experiments["operand's low 13 bits"] = self._low_bits
        return {
            "summation": self.summation.text,
            "products per addition": ", ".join(map(str, self.summation.sizes)) or UNKNOWN,
            "accumulator joins": self._joins(),
            **{name: self._answer(ask) for name, ask in experiments.items()},
        }

    @staticmethod
    def _answer(ask: Callable[[], str]) -> str:
        """The quantity as text, or UNKNOWN if its experiment cannot be expressed."""
        try:
            return ask()
        except UnrepresentableError:
            return UNKNOWN

    def _joins(self) -> str:
        place = self.summation.place_of_c
        if place is None:
            return UNKNOWN
        if self.summation.chain is None:
            return "in a tree of sums"
        if len(self.summation.groups[place]) > 1:
            return (
                self._answer(self._with_products)
                if place == 0
                else f"with the products of group {place + 1}"
            )
        return (
            "after all products"
            if place == len(self.summation.groups) - 1
            else f"after group {place}"
        )

    def _with_products(self) -> str:
        """Whether the accumulator is aligned with the products or with their sum.

        The products cancel except for one unit.
        """
        group = self.summation.products_in(self.summation.groups[0])
        if len(group) < 2:
            return "with the first product"
        top = 2.0 ** (self.lab.operands.precision - 1)
        scale = 0.5 if 2 * top > self.lab.operands.max else 1.0  # of one operand of each product
        pairs = {
            group[0]: (2 * top - 1, (2 * top - 1) * scale),
            group[1]: (-(2 * top - 2), 2 * top * scale),
        }
        unit = scale
        # Half of the smallest value that survives an alignment with the products.
        lost = top * top * 2 * unit * 2.0**-self._fraction / 2
        ulp = unit * 2.0 ** (1 - self.lab.result.precision)
        c = lost if lost >= ulp else ulp / 2 + lost
        without, result = self.lab.run([Sum(pairs=pairs, c=0.0), Sum(pairs=pairs, c=c)])
        if without != unit:
            return f"unclear: products that leave {unit:g} give {without:g}"
        return (
            "aligned with the first products"
            if result == unit
            else "after the first products, aligned with their sum"
        )

    # Alignment.

    @cached_property
    def _depth_of_survival(self) -> tuple[int, bool]:
        """The largest j for which 2**-j survives a sum with +1 and -1, and whether a smaller value
        was lost."""
        if len(self.summation.first) < 3:
            raise UnrepresentableError("fewer than three products at once")
        i, j, k = self.summation.first[:3]
        big, kept = 2.0**self.summation.top, 0
        least = 2 * (self.lab.operands.emin - self.lab.operands.precision + 1)
        least = max(least, self.lab.result.emin - self.lab.result.precision + 1)
        for depth in range(1, self.summation.top - least + 1):
            small = math.ldexp(big, -depth)
            if self.lab.run([Sum({i: big, j: -big, k: small})]) != [small]:
                return kept, True
            kept = depth
        return kept, False

    @property
    def _fraction(self) -> int:
        return self._depth_of_survival[0]

    def _fraction_in_words(self) -> str:
        if len(self.summation.first) == 1:
            return "none: every product is rounded"
        return _at_least(*self._depth_of_survival)

    def _alignment(self) -> str:
        """The rounding of values below the last kept place, and whether two halves of it are
        rounded each or as a sum."""
        i, j, k = self.summation.first[:3] if len(self.summation.first) > 2 else (0, 0, 0)
        big, last = 2.0**self.summation.top, math.ldexp(1.0, self.summation.top - self._fraction)
        sums = [Sum({i: big, j: -big, k: half * last}) for half in _HALVES]
        rounding = _named([result / last for result in self.lab.run(sums)])
        if len(self.summation.first) > 3:
            two = Sum({i: big, j: -big, k: last / 2, self.summation.first[3]: last / 2})
            summed = self.lab.run([two]) == [last]
            rounding += ", the sum" if summed else ", each term"
        return rounding

    # Conversion.

    @property
    def _one(self) -> float:
        """A power of two: products can be much smaller than it, and sums can be larger."""
        return 2.0 ** (self.summation.top - 2)

    @cached_property
    def _output(self) -> tuple[int, bool]:
        """The fraction bits that a sum of 1 + 1 + 2**(1 - j) keeps, in units of `_one`, and whether
        a smaller term was lost."""
        if len(self.summation.first) < 3:
            raise UnrepresentableError("fewer than three products at once")
        i, j, k = self.summation.first[:3]
        one, kept = self._one, 0
        for depth in range(1, self._fraction + 2):
            small = math.ldexp(2 * one, -depth)
            if self.lab.run([Sum({i: one, j: one, k: small})]) != [2 * one + small]:
                return kept, True
            kept = depth
        return kept, False

    def _output_in_words(self) -> str:
        return "as C's" if len(self.summation.first) == 1 else _at_least(*self._output)

    def _rounding(self) -> str:
        if len(self.summation.first) < 4:
            return "as C's" if len(self.summation.first) == 1 else UNKNOWN
        i, j, k, m = self.summation.first[:4]
        bits, bounded = self._output
        if not bounded or bits > self._fraction:
            return UNKNOWN
        one, ulp, sums = self._one, math.ldexp(2 * self._one, -bits), []
        for half in _HALVES:
            sign = math.copysign(1.0, half)
            ulps = sign * ulp if abs(half) > 1 else 0.0
            sums.append(Sum({i: sign * one, j: sign * one, k: ulps, m: sign * ulp / 2}))
        results = zip(_HALVES, self.lab.run(sums), strict=True)
        return _named([(result - math.copysign(2 * one, half)) / ulp for half, result in results])

    # The accumulator.

    def _bits_of_c(self) -> str:
        """Fraction bits of C = 1 + 2**-j that survive the addition of a product of 1."""
        return self._kept_of_c({0: 1.0}, 2.0)

    def _bits_of_c_alone(self) -> str:
        """The same if all products are zero."""
        return self._kept_of_c({}, 1.0)

    def _kept_of_c(self, products: dict[int, float], base: float) -> str:
        kept = 0
        for depth in range(1, self.lab.result.precision):
            small = math.ldexp(base, -depth)
            c = 1.0 + small
            if not representable(c, self.lab.result):
                return f"{kept} or more"
            if self.lab.run([Sum(products, c=c)]) != [base + small]:
                return str(kept)
            kept = depth
        return f"all {kept}"

    def _rounding_of_c(self) -> str:
        """The rounding of C plus a product of half a unit, or one and a half units, in the last
        place that C keeps."""
        one, kept = self._one, 0
        for depth in range(1, self.lab.result.precision):
            small = math.ldexp(one, -depth)
            if self.lab.run([Sum({0: small}, c=one)]) != [one + small]:
                break
            kept = depth
        ulp = math.ldexp(one, -kept)
        sums = [Sum({0: half * ulp}, c=math.copysign(one, half)) for half in _HALVES]
        rounded = [
            (got - math.copysign(one, half)) / ulp
            for half, got in zip(_HALVES, self.lab.run(sums), strict=True)
        ]
        return f"{_named(rounded)}, {kept} bits"

    # Subnormal numbers.

    @property
    def _tiny(self) -> float:
        return self.lab.operands.smallest_subnormal

    def _subnormal_operands(self) -> str:
        partner = min(
            2.0**-self.lab.operands.emin, 2.0 ** (math.frexp(self.lab.operands.max)[1] - 1)
        )
        want = 3 * self._tiny * partner
        pairs = [(3 * self._tiny, partner), (partner, 3 * self._tiny)]
        fates = [
            _outcome(result, want)
            for result in self.lab.run([Sum(pairs={0: pair}) for pair in pairs])
        ]
        return fates[0] if fates[0] == fates[1] else f"{fates[0]} in A, {fates[1]} in B"

    def _normalises(self) -> str:
        """Whether a product of the smallest subnormal is aligned by its exponent or by the smallest
        exponent of its format."""
        if len(self.summation.first) < 3:
            return "nothing is aligned" if len(self.summation.first) == 1 else UNKNOWN
        i, j, k = self.summation.first[:3]
        partner = 2.0 ** (math.frexp(self.lab.operands.max)[1] - 1)
        # Kept if the product is aligned by the smallest exponent.
        last = 2.0**self.lab.operands.emin * partner * 2.0**-self._fraction
        pairs = {i: (self._tiny, partner), j: (-self._tiny, partner)}
        for half in (1.75, 1.5):
            for sum_ in (Sum({k: half * last}, pairs=pairs), Sum(c=half * last, pairs=pairs)):
                if sum_.c and (
                    self.summation.place_of_c != 0 or not representable(sum_.c, self.lab.result)
                ):
                    continue
                try:
                    (result,) = self.lab.run([sum_])
                except UnrepresentableError:
                    continue
                if result == 0:
                    return UNKNOWN
                return "as the smallest normal" if result == last else "by its own exponent"
        return UNKNOWN

    def _subnormal_c(self) -> str:
        c = 3 * self.lab.result.smallest_subnormal
        return _outcome(self.lab.run([Sum(c=c)])[0], c)

    def _subnormal_results(self) -> str:
        want = 3 * self.lab.result.smallest_subnormal
        return _outcome(self.lab.run([Sum({0: want})])[0], want)

    def _low_bits(self) -> str:
        """Whether the 13 bits of an fp32 operand that tf32 lacks are dropped, rounded or kept."""
        below = 1.0 + 2.0**-10 - 2.0**-23
        results = self.lab.run([Sum(pairs={0: (below, 1.0)}), Sum(pairs={0: (1.0, below)})])
        names = {1.0: "dropped", 1.0 + 2.0**-10: "rounded", below: "kept"}
        fates = [names.get(value, f"1 becomes {value.hex()}") for value in results]
        return fates[0] if fates[0] == fates[1] else f"{fates[0]} in A, {fates[1]} in B"


def _at_least(bits: int, bounded: bool) -> str:
    return str(bits) if bounded else f"{bits} or more"


def _outcome(result: float, want: float) -> str:
    return "kept" if result == want else "zero" if result == 0 else f"{want:g} becomes {result:g}"


def _named(rounded: Sequence[float]) -> str:
    """The name of a rounding."""
    found = tuple(value + 0.0 for value in rounded)  # -0 is 0
    return _ROUNDINGS.get(
        found, f"-1.5, -0.5, 0.5, 1.5 become {', '.join(f'{value:g}' for value in found)}"
    )
