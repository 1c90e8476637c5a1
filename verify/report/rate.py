"""How often a variant can still fail that failed nowhere: the upper end of the failure rate.

Of n independent draws that all pass, the failure rate p is below 1 - 0.05^(1/n) with 95 %
confidence: a larger p would let all of them pass in fewer than 5 of 100 campaigns.  That is about
3 / n, the rule of three.
"""

from __future__ import annotations

import math

from verify.document import text
from verify.report.schema import VariantReport

CONFIDENCE = 0.95
NOTE = (
    "A failure rate is that of problems drawn as this campaign draws them, not of all possible"
    " problems (docs/report-schema.md)."
)


def limit(draws: int) -> float:
    """The failure rate below which a kernel is with 95 % confidence that passed so many draws, at
    least one."""
    return -math.expm1(math.log1p(-CONFIDENCE) / draws)


def draws(variant: VariantReport) -> int:
    """The draws that were judged: those of the evidence, or the distinct cases where these are
    fewer (several runs drew one problem)."""
    return sum(min(d["cases"], d["drawn"] - d["refused"]) for d in variant["dtypes"])


def rate(variant: VariantReport) -> str:
    """ "0 of 723 draws failing: the failure rate is below 0.42 % with 95 % confidence"; nothing for
    a variant that fails anywhere or of which nothing was drawn."""
    judged = draws(variant)
    if variant["status"] == "red" or variant["failures"] or variant["failing"] or judged < 1:
        return ""
    percent = f"{_rounded_up(100 * limit(judged)):.2g} %"
    return (
        f"0 of {text.count(judged)} draws failing: the failure rate is below {percent}"
        f" with {100 * CONFIDENCE:g} % confidence"
    )


def _rounded_up(value: float) -> float:
    """To two significant digits, so that what is said to lie below it does."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / digit * (1 - 1e-12)) * digit
