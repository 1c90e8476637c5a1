"""Which levels of which factors met in the cases of a campaign, and which never did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product

from verify.evidence import Verdict
from verify.problem.case import Case, CaseError
from verify.problem.factors import Level, Pair, levels, pair_name, pairs
from verify.report.campaign_schema import PairsReport
from verify.variant import Config


def met(judged: Iterable[Verdict]) -> set[Pair]:
    """The pairs that meet in the cases of these verdicts; a case that this version cannot read has
    none."""
    found: set[Pair] = set()
    for name in {verdict.case for verdict in judged}:
        found |= pairs(_levels(name))
    return found


def report(judged: Iterable[Verdict]) -> PairsReport:
    """The pairs of all variants together."""
    found = met(judged)
    by_factor: defaultdict[str, set[str]] = defaultdict(set)
    for pair in found:
        for factor, level in pair:
            by_factor[factor].add(level)
    every = (
        (one, other)
        for first, second in combinations(sorted(by_factor), 2)
        for one, other in product(_all(first, by_factor), _all(second, by_factor))
    )
    never = [pair_name(pair) for pair in every if pair not in found]
    return {"met": len(found), "never": never}


def _all(factor: str, by_factor: dict[str, set[str]]) -> list[Level]:
    return [(factor, level) for level in sorted(by_factor[factor])]


@cache  # a report asks twice: for the dtype, and for all variants together
def _levels(name: str) -> dict[str, str]:
    try:
        case = Case.parse(name)
        return levels(case.problem, Config.parse(case.config))
    except (CaseError, ValueError):
        return {}
