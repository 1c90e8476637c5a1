"""Two records of one device: which kernels became slower, and by how much more than the noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verify import document as doc
from verify.document import text
from verify.timing.record import Benchmark, Place, Row, place_of

# The clocks of a GPU wander by a few percent from run to run, all calls of a run alike: below this
# a difference of two runs says nothing, however narrow the bands of both are.
THRESHOLD = 1.05


@dataclass(frozen=True)
class Change:
    """One row in two records.  ratio: new median / old median; low, high: the smallest and the
    largest ratio that their 10th and 90th percentiles allow."""

    place: Place
    old: float
    new: float
    low: float
    high: float
    other_source: bool

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def slower(self) -> bool:
        """Beyond the noise of both runs, and beyond what clocks wander."""
        return self.low > 1 and self.ratio > THRESHOLD

    @property
    def faster(self) -> bool:
        return self.high < 1 and self.ratio < 1 / THRESHOLD


@dataclass(frozen=True)
class Comparison:
    """changes: of rows that both records timed.  gone: rows that only the old one timed, and which
    the new one tried or left, with the reason.  unasked: how many the new one did not ask for."""

    same_device: bool
    changes: tuple[Change, ...]
    gone: tuple[tuple[Place, str], ...]
    added: tuple[Place, ...]
    unasked: int

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.slower)

    @property
    def regressed(self) -> bool:
        """A row is slower, or fails that was timed before; of one device alone."""
        return self.same_device and (
            bool(self.slower) or any(reason.startswith("failed") for _, reason in self.gone)
        )


def compare(old: Benchmark, new: Benchmark) -> Comparison:
    """Compare two records row by row."""
    before, after = (
        {place_of(row): row for row in record["rows"] if row["outcome"] == "timed"}
        for record in (old, new)
    )
    reasons = {place_of(row): f"{row['outcome']}: {row['reason']}" for row in new["rows"]}
    left = {(one["variant"], one["dtype"]): one["reason"] for one in new["left"]}
    for at in before.keys() - reasons.keys():
        variant, _, dtype, _ = at
        if (variant, dtype) in left:
            reasons[at] = f"left: {left[variant, dtype]}"
    return Comparison(
        same_device=old["device"].get("slug") == new["device"].get("slug"),
        changes=tuple(_change(at, before[at], after[at]) for at in before if at in after),
        gone=tuple((at, reasons[at]) for at in before if at not in after and at in reasons),
        added=tuple(at for at in after if at not in before),
        unasked=sum(at not in reasons for at in before),
    )


def _change(place: Place, old: Row, new: Row) -> Change:
    was, now = old["seconds"], new["seconds"]
    return Change(
        place=place,
        old=was["median"],
        new=now["median"],
        low=now["p10"] / was["p90"],
        high=now["p90"] / was["p10"],
        other_source=old["source_hash"] != new["source_hash"],
    )


def document(found: Comparison) -> doc.Document:
    """A table of each kind of change that is there, the bad news first."""
    verdict = "slower" if found.regressed else "no regression"
    said = []
    if not found.same_device:
        said.append("The records are of different devices: no change is a regression.")
    if found.unasked:
        said.append(f"{found.unasked} rows of the old record were not asked for in the new one.")
    return doc.Document(
        f"speed, {len(found.changes)} rows in both: {verdict}",
        tuple(map(doc.Paragraph, said)),
        tuple(_sections(found)),
    )


def _sections(found: Comparison) -> Iterator[doc.Section]:
    columns = ("workload", "variant", "config", "dtype")
    change = (*columns, "old", "new", "ratio", "noise", "source")
    by = f"(beyond the noise of both, and by more than {100 * THRESHOLD - 100:.0f} %)"
    slower = [_row(one) for one in found.changes if one.slower]
    faster = [_row(one) for one in found.changes if one.faster]
    gone = [(*_names(place), reason) for place, reason in found.gone]
    tables: list[tuple[str, tuple[str, ...], list[doc.Row]]] = [
        (f"Slower {by}", change, slower),
        ("No longer timed", (*columns, "why"), [*gone]),
        (f"Faster {by}", change, faster),
        ("Timed for the first time", columns, [_names(place) for place in found.added]),
    ]
    for title, names, rows in tables:
        if rows:
            yield doc.Section(title, "", (doc.Table(names, tuple(rows)),))


def _names(place: Place) -> tuple[str, str, str, str]:
    variant, config, dtype, workload = place
    return workload.name, variant, config, dtype


def _row(change: Change) -> doc.Row:
    source = "changed" if change.other_source else "the same"
    band = f"{text.number(change.low)} to {text.number(change.high)}"
    times = map(doc.seconds, (change.old, change.new))
    return (*_names(change.place), *times, doc.Number(change.ratio), band, source)
