"""Verdicts: all that a run judged, in order, and chosen parts of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import overload

from verify.evidence.records import INAPPLICABLE, Verdict
from verify.evidence.tables import Said, Shape, Table, packed

Part = tuple[Table, tuple[int, ...]]
"""A table, and which of its oracles, by their places in its shape."""


@dataclass(frozen=True, eq=False)
class Verdicts(Collection[Verdict]):
    """Verdicts, sorted by case and oracle; each is made anew when it is asked for.

    Loops over many cases ask `parts` and `verify.evidence.columns` instead, for all cases of a
    shape at once.
    """

    parts: tuple[Part, ...] = ()

    @staticmethod
    def of(verdicts: Iterable[Verdict]) -> Verdicts:
        """These verdicts; those that are `Verdicts` already stay as they are."""
        return verdicts if isinstance(verdicts, Verdicts) else Verdicts.in_tables(packed(verdicts))

    @staticmethod
    def in_tables(tables: Iterable[Table]) -> Verdicts:
        """All verdicts of tables."""
        return Verdicts(
            tuple((table, tuple(range(len(table.shape.said)))) for table in tables if table.cases)
        )

    @staticmethod
    def together(several: Iterable[Verdicts]) -> Verdicts:
        """All of these, which have no verdict in common."""
        return Verdicts(tuple(part for each in several for part in each.parts))

    def where(self, keep: Callable[[Shape, Said], bool]) -> Verdicts:
        """Those of the oracles of shapes that are to be kept."""
        parts = []
        for table, places in self.parts:
            shape = table.shape
            kept = tuple([place for place in places if keep(shape, shape.said[place])])
            if kept:
                parts.append((table, kept))
        return Verdicts(tuple(parts))

    @cached_property
    def counted(self) -> Verdicts:
        """Those of counted phases."""
        return self.where(lambda shape, said: shape.counted)

    @cached_property
    def judged(self) -> Verdicts:
        """Those that count and say something of their case."""
        return self.where(lambda shape, said: shape.counted and said.outcome != INAPPLICABLE)

    @cached_property
    def failing(self) -> tuple[Verdict, ...]:
        """Those that fail, sorted."""
        return tuple(self.where(lambda shape, said: said.outcome == "fail"))

    @cached_property
    def first_with_words(self) -> tuple[Verdict, ...]:
        """Of the verdicts of each table and oracle that say the same in words the first, sorted."""
        found: list[Verdict] = []
        for table, places in self.parts:
            first: dict[int, int] = {}
            for row, words in enumerate(table.words):
                earlier = first.setdefault(id(words), row)
                if table.cases[row] < table.cases[earlier]:
                    first[id(words)] = row
            found += [table.verdict(row, said) for row in first.values() for said in places]
        return tuple(sorted(found, key=lambda verdict: (verdict.case, verdict.oracle)))

    @property
    def tables(self) -> list[Table]:
        """All tables that they are in."""
        return [table for table, _ in self.parts]

    @cached_property
    def cases(self) -> frozenset[str]:
        """The cases that they are on."""
        return frozenset[str]().union(*(table.cases for table, _ in self.parts))

    @cached_property
    def repeated(self) -> frozenset[str]:
        """The cases that more than one row is about."""
        if sum(len(table.cases) for table, _ in self.parts) == len(self.cases):
            return frozenset()
        seen: set[str] = set()
        found: set[str] = set()
        for table, _ in self.parts:
            here = set(table.cases)
            if len(here) < len(table.cases):
                found.update(_twice(table.cases))
            found |= seen & here
            seen |= here
        return frozenset(found)

    def by_dtype(self) -> dict[tuple[str, str], Verdicts]:
        """Those of each variant and dtype, sorted by them."""
        found: dict[tuple[str, str], list[Part]] = {}
        for part in self.parts:
            shape = part[0].shape
            found.setdefault((shape.variant, shape.dtype), []).append(part)
        return {key: Verdicts(tuple(found[key])) for key in sorted(found)}

    def __len__(self) -> int:
        return sum(len(table.cases) * len(places) for table, places in self.parts)

    def __iter__(self) -> Iterator[Verdict]:
        rows = [
            (case, place, row)
            for place, (table, _) in enumerate(self.parts)
            for row, case in enumerate(table.cases)
        ]
        rows.sort()
        for _, group in groupby(rows, itemgetter(0)):
            found = [
                table.verdict(row, said)
                for _, place, row in group
                for table, places in (self.parts[place],)
                for said in places
            ]
            found.sort(key=lambda verdict: verdict.oracle)
            yield from found

    def __contains__(self, one: object) -> bool:
        return isinstance(one, Verdict) and any(
            one == table.verdict(row, said)
            for table, places in self.parts
            for row, case in enumerate(table.cases)
            if case == one.case
            for said in places
        )

    @overload
    def __getitem__(self, place: int) -> Verdict: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Verdict, ...]: ...
    def __getitem__(self, place: int | slice) -> Verdict | tuple[Verdict, ...]:
        """By place in their order; it makes all of them: no loop should ask."""
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        """As tuples of verdicts are equal."""
        if not isinstance(other, Verdicts | tuple):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == its for mine, its in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _twice(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
