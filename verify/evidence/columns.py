"""Columns: one measure of many verdicts as an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verify.evidence.records import Verdict
from verify.evidence.tables import Table
from verify.evidence.verdicts import Verdicts

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """The rows of one table as one of its oracles, by its place, has them."""

    table: Table
    said: int

    def __len__(self) -> int:
        return len(self.table.cases)

    def __contains__(self, measure: object) -> bool:
        return measure in self.table.columns[self.said]

    @property
    def oracle(self) -> str:
        """The name of the oracle."""
        return self.table.shape.said[self.said].oracle

    @property
    def observed(self) -> Iterator[tuple[int, dict[str, str]]]:
        """What the oracle observed, by row, where it did."""
        for row, words in enumerate(self.table.words):
            for each in words:
                if each.said == self.said and each.observed:
                    yield row, dict(each.observed)

    def verdict(self, row: int) -> Verdict:
        """What the oracle says of the case of a row."""
        return self.table.verdict(row, self.said)

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of its measures."""
        return self.table.shape.said[self.said].measures

    def measure(self, name: str, default: float | None = None) -> Numbers:
        """The values of a measure; raises KeyError without it and without a default."""
        column = self.table.columns[self.said].get(name)
        if column is not None:
            return _column(self.table, column)
        if default is None:
            raise KeyError(name)
        return np.full(len(self), default)


class Column:
    """Numbers of all rows of some blocks, in the order of these."""

    def __init__(self, blocks: list[Block], of: Callable[[Block], Numbers]) -> None:
        self._blocks = blocks
        self._of = of
        parts = [of(block) for block in blocks]
        self.values: Numbers = np.concatenate(parts) if parts else np.empty(0)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def cases(self) -> list[str]:
        """The case of each row."""
        return [case for block in self._blocks for case in block.table.cases]

    @property
    def oracles(self) -> list[str]:
        """The oracle of each row."""
        return [block.oracle for block in self._blocks for _ in range(len(block))]

    def first_of(self, wanted: float) -> Verdict:
        """Of the rows with that value the one whose case, then oracle, comes first by name.  All
        NaN are one value."""
        found: list[tuple[str, str, Block, int]] = []
        for block in self._blocks:
            values = self._of(block)
            same = np.isnan(values) if np.isnan(wanted) else values == wanted
            rows = np.flatnonzero(same).tolist()
            if rows:
                cases = block.table.cases
                row = min(rows, key=cases.__getitem__)
                found.append((cases[row], block.oracle, block, row))
        _, _, block, row = min(found, key=lambda one: one[:2])
        return block.verdict(row)

    @property
    def smallest(self) -> float:
        """The smallest number; NaN only if there is no number."""
        return float(np.fmin.reduce(self.values))

    @property
    def largest(self) -> float:
        """The largest number; NaN if there is one."""
        return float(np.maximum.reduce(self.values))


def blocks(verdicts: Verdicts, *measures: str) -> list[Block]:
    """The blocks that have all of these measures."""
    return [block for block in all_blocks(verdicts) if all(name in block for name in measures)]


def all_blocks(verdicts: Verdicts) -> Iterator[Block]:
    """A block for each table and oracle."""
    for table, places in verdicts.parts:
        for said in places:
            yield Block(table, said)


def column(verdicts: Verdicts, measure: str) -> Column:
    """A measure of all verdicts that have it."""
    return Column(blocks(verdicts, measure), lambda block: block.measure(measure))


def steps(table: Table) -> dict[str, Numbers]:
    """The seconds of each step."""
    return {name: _column(table, place) for name, place in table.steps.items()}


def _column(table: Table, place: int) -> Numbers:
    """A copy: the table can grow."""
    return np.frombuffer(table.values, np.float64)[place :: table.width].copy()
