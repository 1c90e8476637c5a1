"""How far pooled statistics of honest rows may lie off, at a stated rate of false alarms.

z = error / (sigma + allowance), elementwise; x = mean of z^2 and y = mean of z over the elements of
a row.  A sum of independent errors, each uniform around 0, is strictly sub-Gaussian: its moment
generating function is at most that of a normal number of the same variance (that of one uniform
error is: its Taylor coefficients are smaller).  So E exp(t z) <= exp(t^2 / 2) but for the
allowance, and, averaged over normal t, E exp(s z^2) <= (1 - 2 s)^(-1/2).  Means over a row are no
worse, whatever its elements have in common, since exp is convex.  Over N independent rows
Chernoff's bound follows:

    P(mean x >= a) <= exp(-N (a - 1 - ln a) / 2)        P(|mean y| >= b + mean allowance) <= 2
    exp(-N b^2 / 2)
"""

from __future__ import annotations

import math

FALSE_ALARM = 1e-9  # chance that an honest campaign fails, all its tests together
# chance that one honest (variant, dtype, tensor) is called more accurate than declared
FALSE_NOTE = 1e-6
# what sigma may be off by, relative: roundings are uniform only nearly, and errors add up in the
# first order
MODEL = 0.02
_KURTOSIS = 3.0  # E z^4 / (E z^2)^2 of a sum of uniform errors is less


def square_limit(rows: float, chance: float) -> float:
    """The mean of x over so many rows that honest ones reach with that chance at most."""
    if rows <= 0:
        return math.inf
    wanted, low, high = -2 * math.log(chance) / rows, 1.0, 2.0
    while high - 1 - math.log(high) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - 1 - math.log(middle) < wanted else (low, middle)
    return high


def mean_limit(rows: float, chance: float) -> float:
    """The size of the mean of y over so many rows, allowance apart, that honest ones reach with
    that chance at most."""
    return math.sqrt(2 * math.log(2 / chance) / rows) if rows > 0 else math.inf


def rows_for_note(share: float) -> float:
    """Rows after which the mean of error^2 / sigma^2, 1 for the least that roundings give, is 1 -
    share / 2 by chance no more.

    Sums of independent non-negative numbers fall short of their mean by t with a chance of exp(-N
    t^2 / (2 E x^2)) at most (Maurer, "A bound on the deviation probability for sums of non-negative
    random variables", JIPAM 4, 2003).
    """
    return 8 * _KURTOSIS * -math.log(FALSE_NOTE) / share**2 if share > 0 else math.inf
