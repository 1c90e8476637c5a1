"""Which levels of which factors met in the cases of a campaign, and which never did."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    never = [pair_name(pair) for pair in _every(by_factor) if pair not in found]
    return {"met": len(found), "never": never, "levels": _sorted(by_factor)}


def joined(*reports: PairsReport) -> PairsReport:
    """What several reports of one device say together.  One of an earlier day, which does not tell
    its levels, is taken to have had all of them."""
    by_factor: defaultdict[str, set[str]] = defaultdict(set)
    for one in reports:
        for factor, names in _levels_of(one).items():
            by_factor[factor].update(names)
    missing = [(set(one["never"]), one.get("levels")) for one in reports]

    def met(pair: Pair) -> bool:
        return any(
            pair_name(pair) not in never
            and (levels is None or all(level in levels.get(factor, ()) for factor, level in pair))
            for never, levels in missing
        )

    every = _every(by_factor)
    never = [pair_name(pair) for pair in every if not met(pair)]
    # more than `every` only where one does not tell its levels
    count = max(len(every), *(one["met"] + len(one["never"]) for one in reports))
    return {"met": count - len(never), "never": never, "levels": _sorted(by_factor)}


def _levels_of(report: PairsReport) -> Mapping[str, Iterable[str]]:
    """The levels that a report tells, or else those that it names."""
    if "levels" in report:
        return report["levels"]
    named: defaultdict[str, set[str]] = defaultdict(set)
    for name in report["never"]:
        for each in name.split(" with "):
            factor, _, level = each.partition(" ")
            named[factor].add(level)
    return named


def _every(by_factor: Mapping[str, AbstractSet[str]]) -> list[Pair]:
    levels = {
        factor: [(factor, level) for level in sorted(by_factor[factor])] for factor in by_factor
    }
    return [
        pair
        for first, second in combinations(sorted(levels), 2)
        for pair in product(levels[first], levels[second])
    ]


def _sorted(by_factor: Mapping[str, AbstractSet[str]]) -> dict[str, list[str]]:
    return {factor: sorted(by_factor[factor]) for factor in sorted(by_factor)}


def _levels(name: str) -> tuple[Level, ...]:
    try:
        case = Case.parse(name)
        return tuple(levels(case.problem, _config(case.config)).items())
    except (CaseError, ValueError):
        return ()


_config = cache(Config.parse)
