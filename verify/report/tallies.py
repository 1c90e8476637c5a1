"""Numbers of a campaign that are counted: cases by bin, by oracle, and those that take memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from verify.evidence import INAPPLICABLE, Verdicts
from verify.evidence.columns import Block, all_blocks, column
from verify.report import statistics
from verify.report.schema import Oracle


def bins(judged: Verdicts) -> Counter[str]:
    """Cases by bin; nearly always one oracle alone says which bins a case is in."""
    found: Counter[str] = Counter()
    several: dict[str, set[str]] = defaultdict(set)
    repeated = judged.repeated
    for table, places in judged.parts:
        alone: Counter[int] = Counter()
        words = {id(each): each for each in table.words}
        named = {
            key: {name for one in each if one.said in places for name in one.bins}
            for key, each in words.items()
        }
        for case, each in zip(table.cases, table.words, strict=True):
            if case in repeated:
                several[case] |= named[id(each)]
            else:
                alone[id(each)] += 1
        for key, count in alone.items():
            found.update(dict.fromkeys(named[key], count))
    for names in several.values():
        found.update(names)
    return found


def oracles(counted: Verdicts) -> list[Oracle]:
    """One entry for each group and oracle, sorted."""
    grouped: dict[tuple[str, str], list[Block]] = defaultdict(list)
    for block in all_blocks(counted):
        grouped[block.table.shape.group, block.oracle].append(block)
    return [
        _oracle(group, oracle, Verdicts(tuple((block.table, (block.said,)) for block in found)))
        for (group, oracle), found in sorted(grouped.items())
    ]


def _oracle(group: str, oracle: str, verdicts: Verdicts) -> Oracle:
    judged = verdicts.judged
    measured = judged.where(lambda shape, said: bool(said.measures))
    skipped = all_blocks(verdicts.where(lambda shape, said: said.outcome == INAPPLICABLE))
    said = (observed.get(INAPPLICABLE) for block in skipped for _, observed in block.observed)
    reasons = Counter(str(reason) for reason in said if reason)
    found: Oracle = {
        "oracle": oracle,
        "group": group,
        "cases": len(judged),
        "failures": len(judged.where(lambda shape, said: said.outcome == "fail")),
        "inapplicable": len(verdicts) - len(judged),
    }
    if ratios := statistics.largest(measured):
        found["r"] = ratios
    if spread := statistics.spread(measured, "lse_ulp"):
        found["lse_ulp"] = spread
    if spread := statistics.spread(measured, "bound_ratio"):
        found["bound_ratio"] = spread
    if reasons:
        found["reasons"] = dict(sorted(reasons.items()))
    return found


def growth(verdicts: Verdicts, measure: str) -> float | None:
    """Bytes that most runs of a variant take and keep (median), or None: the first run of a kernel
    may load and compile."""
    ran = verdicts.counted.where(
        lambda shape, said: said.oracle == "execution" and said.outcome == "pass"
    )
    grown = column(ran, measure).values.tolist()
    return median(grown) if len(grown) > max(2, len(ran) / 2) else None
