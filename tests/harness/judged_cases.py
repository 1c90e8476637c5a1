"""How many cases several runs judged of the present sources, by family and direction:
`python -m tests.harness.judged_cases [RUN ...]`.

RUN is a run's directory, by default each of `.verify/runs`.  A case is judged if an oracle passed
or failed it; it counts once, however many oracles and runs judged it.  Cases of shrinking count
nowhere, and neither does what a run recorded of another source.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verify.cell.discovery import roster
from verify.evidence import Evidence, EvidenceError, load
from verify.machine.places import state_directory


@dataclass
class Tally:
    """cases: ids of the judged ones, failing: of those that some oracle failed, by variant.
    stale: judged cases of other sources, by variant."""

    cases: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    failing: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    stale: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # family and direction

    def add(self, evidence: Evidence, sources: Mapping[str, str]) -> None:
        """Count a run.  sources: today's hashes, by variant."""
        for entry in evidence.variants:
            self.places[entry.ref] = entry.family, " and ".join(entry.entries)
        present = {
            entry.ref
            for entry in evidence.variants
            if sources.get(entry.ref) == entry.source_hash and entry.ref not in evidence.changed
        }
        for table in evidence.verdicts.judged.tables:
            variant = table.shape.variant
            (self.cases if variant in present else self.stale)[variant].update(table.cases)
        for verdict in evidence.verdicts.judged.failing:
            if verdict.variant in present:
                self.failing[verdict.variant].add(verdict.case)

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """(family, direction, variant, cases, failing), sorted; variant is "" in the sum of a
        family and direction, which precedes its variants."""
        found = [
            (*self.places[ref], ref, len(cases), len(self.failing[ref]))
            for ref, cases in self.cases.items()
        ]
        sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for family, direction, _, cases, failing in found:
            sums[family, direction][0] += cases
            sums[family, direction][1] += failing
        found += [(*place, "", cases, failing) for place, (cases, failing) in sums.items()]
        return sorted(found)


def tally(folders: Iterable[Path], sources: Mapping[str, str]) -> Tally:
    """Count the runs in these folders.  Raises EvidenceError for one that cannot be read."""
    counted = Tally()
    for folder in folders:
        counted.add(load(folder), sources)
    return counted


def main(names: list[str]) -> int:
    """Print the table; returns an exit code."""
    folders = [Path(name) for name in names] or sorted((state_directory() / "runs").glob("*/"))
    sources = {entry.ref: entry.source_hash for entry in roster().declarations}
    try:
        counted = tally(folders, sources)
    except EvidenceError as error:
        print(f"judged_cases: {error}", file=sys.stderr)
        return 3
    rows = counted.rows()
    print("| family | direction | variant | judged cases | failing |")
    print("|---|---|---|---:|---:|")
    for family, direction, variant, cases, failing in rows:
        name = variant or "**all**"
        print(f"| {family} | {direction} | {name} | {cases:,} | {failing:,} |")
    total = sum(row[3] for row in rows if not row[2])
    print(f"\n{total:,} judged cases of the present sources in {len(folders)} runs.")
    for variant, cases_ in sorted(counted.stale.items()):
        print(f"not counted, of another source: {len(cases_):,} of {variant}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
