"""Joins what several records say of one case and oracle: one verdict counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from verify.evidence.records import Verdict
from verify.evidence.tables import Table, packed
from verify.evidence.verdicts import Verdicts

Unstable = tuple[tuple[str, str], ...]
"""(case, oracle) that both passed and failed."""


def joined(sources: Sequence[Sequence[Table]]) -> tuple[Verdicts, Unstable]:
    """One verdict per (case, oracle), and what is unstable.

    sources: the tables of each, in the order in which they were recorded.

    A case that fails once and then passes is a race or a dependence on memory, which is worse than
    a plain failure: the failure stays.  A case judged while generating and again while shrinking
    stays counted.
    """
    tables = [table for source in sources for table in source]
    repeated = Verdicts.in_tables(tables).repeated
    if not repeated:
        return Verdicts.in_tables(tables), ()
    dropped: dict[int, set[int]] = {}
    again: list[Verdict] = []
    unstable: list[tuple[str, str]] = []
    for case, rows in sorted(_rows(sources, repeated).items()):
        oracles = [said.oracle for one in rows for said in one.table.shape.said]
        if len(set(oracles)) == len(oracles):
            continue
        kept = _whole(rows)
        if kept is None:
            verdicts = [
                one.table.verdict(one.row, said)
                for one in rows
                for said in range(len(one.table.shape.said))
            ]
            found, both = _join(verdicts)
            again += found
            unstable += [(case, oracle) for oracle in both]
        for one in rows:
            if one is not kept:
                dropped.setdefault(one.place, set()).add(one.row)
    rest = [
        table.without(dropped[place]) if place in dropped else table
        for place, table in enumerate(tables)
    ]
    return Verdicts.in_tables([*rest, *packed(again)]), tuple(unstable)


def joined_with(verdicts: Verdicts, further: Iterable[Verdict]) -> tuple[Verdicts, Unstable]:
    """Joined with further verdicts, which were recorded later."""
    return joined([verdicts.tables, packed(further)])


@dataclass(frozen=True, slots=True)
class _Row:
    """A row on a case; place: of its table among all."""

    table: Table
    place: int
    row: int


def _rows(sources: Sequence[Sequence[Table]], cases: frozenset[str]) -> dict[str, list[_Row]]:
    """The rows on these cases in the order of time, then of reading."""
    found: dict[str, list[_Row]] = {case: [] for case in cases}
    place = 0
    for source in sources:
        read: list[_Row] = []
        for table in source:
            here = enumerate(table.cases)
            read += [_Row(table, place, row) for row, case in here if case in cases]
            place += 1
        read.sort(key=lambda one: one.table.number(one.row))
        for one in read:
            found[one.table.cases[one.row]].append(one)
    for rows in found.values():
        rows.sort(key=lambda one: one.table.time(one.row))
    return found


def _whole(rows: Sequence[_Row]) -> _Row | None:
    """The last row, where it says all that counts: several runs passed the same case."""
    last = rows[-1].table.shape
    asked = {said.oracle for said in last.said}
    for one in rows:
        shape = one.table.shape
        if {said.oracle for said in shape.said} != asked or shape.counted > last.counted:
            return None
        if len(shape.said) > len(asked) or any(said.outcome == "fail" for said in shape.said):
            return None
    return rows[-1]


def _join(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], list[str]]:
    """One verdict per oracle of those on one case, in the order of time; and the unstable
    oracles."""
    found, unstable = [], []
    for oracle, group in groupby(sorted(verdicts, key=attrgetter("oracle")), attrgetter("oracle")):
        said = list(group)
        failed = [v for v in said if v.outcome == "fail"]
        last = (failed or said)[-1]
        counted = [v.phase for v in said if v.counted]
        found.append(last if last.counted or not counted else replace(last, phase=counted[0]))
        if failed and any(v.outcome == "pass" for v in said):
            unstable.append(oracle)
    return found, unstable
