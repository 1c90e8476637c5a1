"""Tables: verdicts as rows of numbers, for campaigns of a million cases.

Most cases say the same in the same form: which oracles passed, which were not asked, what was
measured.  A `Shape` holds that form once.  A `Table` holds the cases of one shape: a name and a row
of numbers each.  A `Verdict` is made when somebody asks for it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from verify.evidence.records import (
    COUNTED_PHASES,
    Finding,
    Outcome,
    Passed,
    Phase,
    Verdict,
    place_of,
)

_TIME, _NUMBER, _HEAD = 0, 1, 2  # columns of every row


@dataclass(frozen=True, slots=True)
class Said:
    """What one oracle says of each case of a shape.  measures: the names."""

    oracle: str
    outcome: Outcome
    measures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What all cases of a table have in common.

    problem: None where it is the last part of the case's id.  seconds: the names of the steps.
    """

    variant: str
    config: str
    dtype: str
    group: str
    phase: Phase
    problem: str | None
    seconds: tuple[str, ...]
    said: tuple[Said, ...]

    @property
    def counted(self) -> bool:
        return self.phase in COUNTED_PHASES


@dataclass(frozen=True, slots=True)
class Words:
    """What is no number in one oracle's verdict on one case.  said: its place in `Shape.said`."""

    said: int
    observed: tuple[tuple[str, str], ...]
    bins: tuple[str, ...]
    finding: Finding | None = None


_Raw = tuple[int, tuple[tuple[str, str], ...], tuple[str, ...], Finding | None]
"""Words before they are shared: quicker to hash."""


@dataclass
class Table:
    """The cases of one shape.

    values: a row for each case: the time, a number that grows in the order of reading, the seconds
    of each step, then the measures of each oracle.  words: of each case, equal ones one object.
    """

    shape: Shape
    cases: list[str] = field(default_factory=list)
    values: array[float] = field(default_factory=lambda: array("d"))
    words: list[tuple[Words, ...]] = field(default_factory=list)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """The columns at which the measures of each oracle begin, and the width of a row."""
        shape = self.shape
        widths = (len(said.measures) for said in shape.said)
        return tuple(accumulate(widths, initial=_HEAD + len(shape.seconds)))

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self._begins[-1]

    @cached_property
    def columns(self) -> tuple[dict[str, int], ...]:
        """For each oracle of the shape: the column of each of its measures."""
        return tuple(
            {name: begin + place for place, name in enumerate(said.measures)}
            for begin, said in zip(self._begins, self.shape.said, strict=False)
        )

    @cached_property
    def steps(self) -> dict[str, int]:
        """The column of the seconds of each step."""
        return {name: _HEAD + place for place, name in enumerate(self.shape.seconds)}

    @property
    def problems(self) -> list[str]:
        """The problem of each case."""
        problem = self.shape.problem
        return [case.rpartition(":")[2] if problem is None else problem for case in self.cases]

    def time(self, row: int) -> float:
        """When the case of a row was judged."""
        return self.values[row * self.width + _TIME]

    def seconds(self, row: int) -> dict[str, float]:
        """The seconds of each step of a case."""
        at = row * self.width + _HEAD
        steps = self.shape.seconds
        return dict(zip(steps, map(_same, self.values[at : at + len(steps)]), strict=True))

    def number(self, row: int) -> float:
        """The place of a row in the order of reading."""
        return self.values[row * self.width + _NUMBER]

    def verdict(self, row: int, said: int) -> Verdict:
        """What one oracle, by its place, says of one case."""
        shape = self.shape
        case = self.cases[row]
        at = row * self.width
        first = at + self._begins[said]
        told = shape.said[said]
        measured = self.values[first : first + len(told.measures)]
        words = next((each for each in self.words[row] if each.said == said), None)
        return Verdict(
            case=case,
            variant=shape.variant,
            config=shape.config,
            dtype=shape.dtype,
            oracle=told.oracle,
            group=shape.group,
            outcome=told.outcome,
            phase=shape.phase,
            problem=case.rpartition(":")[2] if shape.problem is None else shape.problem,
            seconds=self.seconds(row),
            measures=dict(zip(told.measures, map(_same, measured), strict=True)),
            observed=dict(words.observed) if words else {},
            bins=words.bins if words else (),
            finding=words.finding if words else None,
            time=self.values[at + _TIME],
        )

    def share(self, shared: dict[object, object]) -> None:
        """Make equal words one object, as they are in what `shared` holds already."""
        mine = {id(words): words for words in self.words}
        one = {place: shared.setdefault(words, words) for place, words in mine.items()}
        self.words = [one[id(words)] for words in self.words]  # type: ignore[misc]

    def extend(self, other: Table) -> None:
        """Add the rows of another table of the same shape."""
        self.cases += other.cases
        self.values += other.values
        self.words += other.words

    def renumber(self, first: int) -> None:
        """Let the rows stand behind so many others in the order of reading."""
        for at in range(_NUMBER, len(self.values), self.width):
            self.values[at] += first

    def without(self, rows: set[int]) -> Table:
        """All rows but these."""
        kept = [row for row in range(len(self.cases)) if row not in rows]
        found = Table(self.shape)
        found.cases = [self.cases[row] for row in kept]
        found.words = [self.words[row] for row in kept]
        for row in kept:
            found.values.extend(self.values[row * self.width : (row + 1) * self.width])
        return found


def _same(value: float) -> float:
    """The value; of NaN always one object, so that equal verdicts compare as equal."""
    return math.nan if math.isnan(value) else value


class Packer:
    """Puts verdicts into tables.

    shared: equal texts, and equal words, become one object; several packers can share it.
    """

    def __init__(self, shared: dict[object, object] | None = None) -> None:
        self._shared: dict[object, object] = {} if shared is None else shared
        self._tables: dict[object, Table] = {}
        self._picks: dict[object, tuple[Table, tuple[tuple[int, int], ...]]] = {}
        self._rows = 0

    @property
    def tables(self) -> list[Table]:
        """Those that are filled, in the order of their first rows."""
        return [*self._tables.values()]

    def add(self, verdict: Verdict) -> None:
        """Add one verdict as a row of its own."""
        problem = self._problem(verdict.case, verdict.problem)
        said = Said(verdict.oracle, verdict.outcome, tuple(verdict.measures))
        key = (
            *(verdict.variant, verdict.config, verdict.dtype, verdict.group, verdict.phase),
            *(problem, tuple(verdict.seconds), (said,)),
        )
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = Table(self._shape(Shape(*key)))
        words: tuple[_Raw, ...] = ()
        if verdict.observed or verdict.bins or verdict.finding:
            observed = tuple(verdict.observed.items())
            words = ((0, observed, verdict.bins, verdict.finding),)
        numbers = [verdict.time, *verdict.seconds.values(), *verdict.measures.values()]
        self._append(table, verdict.case, numbers, words)

    def add_passed(self, passed: Passed) -> Table:
        """Add all verdicts of a case that no oracle convicts, as one row of the table that is
        returned."""
        told = passed.told
        case = passed.case
        key = (
            *(case.rpartition(":")[0] or case, passed.dtype, passed.phase),
            *(passed.passing, passed.inapplicable, tuple(passed.seconds)),
            tuple([(each.oracle, tuple(each.measures)) for each in told]),
        )
        known = self._picks.get(key)
        if known is None:
            known = self._picks[key] = self._passed_table(passed)
        table, picks = known
        numbers = [passed.time, *passed.seconds.values()]
        words: tuple[_Raw, ...] = ()
        for said, pick in picks:
            one = told[pick]
            numbers += one.measures.values()
            if one.observed or one.bins:
                words = (*words, (said, tuple(one.observed.items()), one.bins, None))
        self._append(table, case, numbers, words)
        return table

    def _append(
        self, table: Table, case: str, numbers: list[float], words: tuple[_Raw, ...]
    ) -> None:
        numbers.insert(_NUMBER, self._rows)
        self._rows += 1
        table.values.fromlist(numbers)
        one = self._shared.setdefault
        table.cases.append(one(case, case))  # type: ignore[arg-type]
        known = self._shared.get(words)
        if known is None:
            known = one(words, self._words(words))
        table.words.append(known)  # type: ignore[arg-type]

    def _passed_table(self, passed: Passed) -> tuple[Table, tuple[tuple[int, int], ...]]:
        """The table for a case; and for each of its oracles that told something its place, and
        the place of what it told."""
        variant, config, group, problem = place_of(passed.case)
        places = {each.oracle: place for place, each in enumerate(passed.told)}
        outcomes = passed.outcomes
        telling = [places.get(oracle) for oracle, _ in outcomes]
        picks = tuple((said, pick) for said, pick in enumerate(telling) if pick is not None)
        said = tuple(
            Said(oracle, outcome, () if pick is None else tuple(passed.told[pick].measures))
            for (oracle, outcome), pick in zip(outcomes, telling, strict=True)
        )
        key = (
            *(variant, config, passed.dtype, group, passed.phase),
            *(self._problem(passed.case, problem), tuple(passed.seconds), said),
        )
        if key not in self._tables:
            self._tables[key] = Table(self._shape(Shape(*key)))
        return self._tables[key], picks

    @staticmethod
    def _problem(case: str, problem: str) -> str | None:
        return None if problem == case.rpartition(":")[2] else problem

    def _shape(self, shape: Shape) -> Shape:
        """The same, of shared texts."""
        return Shape(
            variant=self._one(shape.variant),
            config=self._one(shape.config),
            dtype=self._one(shape.dtype),
            group=self._one(shape.group),
            phase=shape.phase,
            problem=shape.problem,
            seconds=tuple(map(self._one, shape.seconds)),
            said=tuple(
                Said(self._one(each.oracle), each.outcome, tuple(map(self._one, each.measures)))
                for each in shape.said
            ),
        )

    def _words(self, words: tuple[_Raw, ...]) -> tuple[Words, ...]:
        """The same, of shared texts."""
        one = self._one
        return tuple(
            Words(
                said,
                tuple((one(name), one(word)) for name, word in observed),
                tuple(map(one, bins)),
                finding,
            )
            for said, observed, bins, finding in words
        )

    def _one(self, text: str) -> str:
        return self._shared.setdefault(text, text)  # type: ignore[return-value]


def packed(verdicts: Iterable[Verdict]) -> list[Table]:
    """Tables of verdicts."""
    packer = Packer()
    for verdict in verdicts:
        packer.add(verdict)
    return packer.tables


def together(files: Iterable[Sequence[Table]]) -> list[Table]:
    """The tables of files that were read one by one, changed to what one file would give."""
    found: dict[Shape, Table] = {}
    rows = 0
    for tables in files:
        if rows:
            for table in tables:
                table.renumber(rows)
        rows += sum(len(table.cases) for table in tables)
        for table in tables:
            whole = found.setdefault(table.shape, table)
            if whole is not table:
                whole.extend(table)
    return [*found.values()]
