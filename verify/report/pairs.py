"""Which levels of which factors met in the cases of a campaign, and which never did."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import combinations, product

from verify.evidence import Verdict, Verdicts
from verify.evidence.records import place_of
from verify.problem.case import Case, CaseError
from verify.problem.factors import Level, Pair, levels, pair_name, pairs
from verify.report.campaign_schema import PairsReport
from verify.variant import Config

_VALUES = re.compile(r",(?:dist=\w+|seed=\d+)(?=,|$)", re.ASCII)


def met(judged: Iterable[Verdict]) -> set[Pair]:
    """The pairs that meet in the cases of these verdicts; a case that this version cannot read has
    none."""
    found: set[tuple[Level, ...]] = set()
    known: set[tuple[str, str]] = set()
    for table in Verdicts.of(judged).tables:
        for name in table.cases:
            _, config, _, problem = place_of(name)
            # siblings, which differ in their values alone, have the same levels
            same = config, _VALUES.sub("", problem)
            if same not in known and (one := _levels(name)):
                known.add(same)
                found.add(one)
    return set[Pair]().union(*(pairs(dict(each)) for each in found))


def report(found: AbstractSet[Pair]) -> PairsReport:
    """The pairs of all variants together."""
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


def _levels(name: str) -> tuple[Level, ...]:
    try:
        case = Case.parse(name)
        return tuple(levels(case.problem, _config(case.config)).items())
    except (CaseError, ValueError):
        return ()


_config = cache(Config.parse)
