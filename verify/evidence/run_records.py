"""Records of run directories before they are joined: each variant keeps its newest source's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from verify.evidence.records import (
    Begin,
    Built,
    Drawn,
    Interruption,
    NotRun,
    Passed,
    RunInfo,
    VariantEntry,
    Verdict,
    place_of,
)
from verify.evidence.tables import Table
from verify.evidence.verdicts import Verdicts


@dataclass
class RunRecords:
    """What one run directory holds, in the order of its files.  begins: those that no verdict
    followed, and perhaps some that one did."""

    path: Path
    runs: list[RunInfo] = field(default_factory=list)
    variants: list[VariantEntry] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    builds: list[Built] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    def add(self, other: RunRecords) -> None:
        """Add all that a further file holds but its tables."""
        self.runs += other.runs
        self.variants += other.variants
        self.begins += other.begins
        self.interruptions += other.interruptions
        self.drawn += other.drawn
        self.not_run += other.not_run
        self.builds += other.builds
        self.torn += other.torn

    @property
    def begun(self) -> tuple[str, str]:
        """A sort key: when the run first began; by name, where nothing says when."""
        return min((run.started for run in self.runs), default=""), self.path.name

    @property
    def continued(self) -> str:
        """When the run last began: it looks at the sources then."""
        return max((run.started for run in self.runs), default="")

    @property
    def sources(self) -> Mapping[str, AbstractSet[str]]:
        """The source hashes under which the run knew each variant."""
        found: dict[str, set[str]] = {}
        for entry in self.variants:
            found.setdefault(entry.ref, set()).add(entry.source_hash)
        return found

    def leave_out(self, refs: AbstractSet[str]) -> Iterator[LeftOut]:
        """Drop all records of these variants.  For each that had more than its entry, yields a
        summary of them."""
        for ref in sorted(refs):
            tables = [table for table in self.tables if table.shape.variant == ref]
            if tables or any(built.variant == ref for built in self.builds):
                mine = Verdicts.in_tables(tables)
                failing = {verdict.case for verdict in mine.failing}
                yield LeftOut(ref, self.path.name, len(mine.cases), len(failing))
        self.variants = [entry for entry in self.variants if entry.ref not in refs]
        self.begins = [begin for begin in self.begins if _variant(begin) not in refs]
        self.interruptions = [each for each in self.interruptions if each.variant not in refs]
        self.tables = [table for table in self.tables if table.shape.variant not in refs]
        self.drawn = [drawn for drawn in self.drawn if drawn.variant not in refs]
        self.not_run = [each for each in self.not_run if each.variant not in refs]
        self.builds = [built for built in self.builds if built.variant not in refs]


@dataclass(frozen=True)
class LeftOut:
    """Evidence that does not count, since a later run knew another source of the variant.

    run: the run that it is from.  cases: how many it judged; failures: how many of them fail.
    """

    variant: str
    run: str
    cases: int
    failures: int


def keep_newest_sources(parts: Sequence[RunRecords]) -> tuple[LeftOut, ...]:
    """Drop what runs recorded of a variant's older sources, and return it, sorted by variant.

    The newest source is the one that the last run to begin knew.
    If that run knew two, or if another one began in the same second, nothing says which is newer:
    the evidence of both stays, and `Evidence.changed` names the variant.
    """
    known = [(part, part.sources) for part in parts]
    newest: dict[str, set[str]] = {}
    when: dict[str, str] = {}
    for part, sources in sorted(known, key=lambda each: each[0].continued):
        for ref, hashes in sources.items():
            if when.get(ref) != part.continued:
                newest[ref] = set()
            when[ref] = part.continued
            newest[ref] |= hashes
    found: list[LeftOut] = []
    for part, sources in known:
        older = {ref for ref, hashes in sources.items() if not hashes <= newest[ref]}
        if older:
            found += part.leave_out(older)
    return tuple(sorted(found, key=lambda one: (one.variant, one.run)))


def _variant(begin: Begin) -> str:
    return begin.variant or begin.case.rsplit(":", 3)[0]


class OpenBegins:
    """Begins whose cases have no verdict yet: of a million, nearly all are forgotten at once."""

    def __init__(self) -> None:
        self._of: dict[str, list[Begin]] = {}

    def add(self, begin: Begin) -> None:
        """A case begins."""
        self._of.setdefault(begin.case, []).append(begin)

    def judged(self, record: Verdict | Passed) -> None:
        """A case has a verdict; a begin of another variant stays."""
        begun = self._of.pop(record.case, None)
        if begun is None:
            return
        variant = record.variant if isinstance(record, Verdict) else place_of(record.case)[0]
        if others := [begin for begin in begun if _variant(begin) != variant]:
            self._of[record.case] = others

    @property
    def open(self) -> list[Begin]:
        """In the order of reading, as far as they are of one case."""
        return [begin for begun in self._of.values() for begin in begun]
