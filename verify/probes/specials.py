"""The result bits of a matrix instruction for zeros, infinities, NaN, overflow and underflow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from verify.probes.lab import Lab, Sum, UnrepresentableError

_INF, _NAN = math.inf, math.nan


def specials(lab: Lab) -> dict[str, str]:
    """Name of an experiment -> the result's bits.  Experiments that the instruction's formats
    cannot express are left out."""
    bits = {}
    for name, sum_ in _experiments(lab):
        try:
            (bits[name],) = lab.bits([sum_])
        except UnrepresentableError:
            continue
    return bits


def _experiments(lab: Lab) -> Iterator[tuple[str, Sum]]:
    every = range(lab.depth)
    yield "0 + 0", Sum()
    yield "C = -0, products +0", Sum(c=-0.0)
    yield "C = -0, products -0", Sum(c=-0.0, pairs=dict.fromkeys(every, (-0.0, 1.0)))
    yield "C = +0, products -0", Sum(pairs=dict.fromkeys(every, (-0.0, 1.0)))
    yield "1 - 1", Sum({0: 1.0, 1: -1.0})
    yield "C = 1, product -1", Sum({0: -1.0}, c=1.0)
    yield "C = -1, product 1", Sum({0: 1.0}, c=-1.0)
    # This result differs between generations of units.
    yield (
        "C = 2^23, products -2^23, -1/2, -1/4, -1/8",
        Sum({0: -(2.0**23), 1: -0.5, 2: -0.25, 3: -0.125}, c=2.0**23),
    )
    yield from _infinite()
    yield from _large(lab)
    yield from _small(lab)


def _infinite() -> Iterator[tuple[str, Sum]]:
    def of(pairs: Mapping[int, tuple[float, float]], c: float = 0.0) -> Sum:
        return Sum(c=c, pairs=pairs)

    yield "inf 1", of({0: (_INF, 1.0)})
    yield "-inf 1", of({0: (-_INF, 1.0)})
    yield "inf 1 - inf 1", of({0: (_INF, 1.0), 1: (-_INF, 1.0)})
    yield "inf 0", of({0: (_INF, 0.0)})
    yield "0 inf", of({0: (0.0, _INF)})
    yield "NaN 1", of({0: (_NAN, 1.0)})
    yield "-NaN 1", of({0: (math.copysign(_NAN, -1.0), 1.0)})
    yield "NaN 0", of({0: (_NAN, 0.0)})
    yield "C = inf", of({}, _INF)
    yield "C = -inf, product 1", of({0: (1.0, 1.0)}, -_INF)
    yield "C = inf, product -inf", of({0: (-_INF, 1.0)}, _INF)
    yield "C = NaN", of({}, _NAN)
    yield "C = -NaN, product 1", of({0: (1.0, 1.0)}, math.copysign(_NAN, -1.0))


def _large(lab: Lab) -> Iterator[tuple[str, Sum]]:
    """Experiments at the end of the accumulator's range; ulp: the last place of its largest
    number."""
    largest, ulp = (
        lab.result.max,
        math.ldexp(1.0, math.frexp(lab.result.max)[1] - lab.result.precision),
    )
    top = 2.0 ** (math.frexp(largest)[1] - 1)
    for ulps in (0.25, 0.5, 0.75, 1.0, 2.0):
        yield f"C = max, product {ulps:g} ulp", Sum({0: ulps * ulp}, c=largest)
        yield f"C = -max, product -{ulps:g} ulp", Sum({0: -ulps * ulp}, c=-largest)
    yield "two products of half the range", Sum({0: top, 1: top})
    yield "minus two products of half the range", Sum({0: -top, 1: -top})
    yield "four products of half the range that cancel", Sum({0: top, 1: top, 2: -top, 3: -top})
    yield "C of half the range, such products that cancel", Sum({0: top, 1: -top, 2: -top}, c=top)
    large = 2.0 ** (math.frexp(lab.operands.max)[1] - 1)
    if large * large > largest:
        yield "a product beyond the range", Sum(pairs={0: (large, large)})
        yield (
            "two products beyond the range that cancel",
            Sum(pairs={0: (large, large), 1: (-large, large)}),
        )
        yield "C = -inf, a product beyond the range", Sum(c=-_INF, pairs={0: (large, large)})


def _small(lab: Lab) -> Iterator[tuple[str, Sum]]:
    tiny, least = lab.operands.smallest_subnormal, lab.result.smallest_subnormal
    normal = 2.0**lab.result.emin
    yield "C = -smallest", Sum(c=-least)
    yield "C = smallest, product of smallest subnormals", Sum(c=least, pairs={0: (tiny, tiny)})
    yield "product of smallest subnormals", Sum(pairs={0: (tiny, tiny)})
    yield "minus a product of smallest subnormals", Sum(pairs={0: (-tiny, tiny)})
    yield (
        "minus all products of smallest subnormals",
        Sum(pairs=dict.fromkeys(range(lab.depth), (-tiny, tiny))),
    )
    yield "C = smallest normal, minus smallest", Sum({0: -least}, c=normal)
    for parts in (0.5, 0.75, 1.0, 1.5):
        yield f"product of {parts:g} smallest", Sum({0: parts * least})
        yield f"product of -{parts:g} smallest", Sum({0: -parts * least})
