"""Two reports of the same device, or of two devices: what got worse, what got better, and what is
no longer judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verify.document import Document, Number, Paragraph, Row, Section, Table, markdown, terminal
from verify.report import statistics, words
from verify.report.power import FAULTS
from verify.report.schema import TENSORS, Oracle, Report, ReportError, VariantReport

# Largest values of random draws wander: between two runs of one kernel with different seeds, by
# tens of percent.  A ratio of 1.25 is where a person should look; it decides nothing (r <= 1 does).
THRESHOLD = 1.25
# Below these a change is of no interest: a hundredth of the bound; half an ulp of fp32, a correctly
# rounded LSE; no spill.
FLOORS = {
    **{f"r_{name}": 0.01 for name in TENSORS},
    "lse_ulp": 0.5,
    "spill": 0.0,
    **{f"power_{fault}": 0.0 for fault in FAULTS},
}

Place = tuple[str, str, str]  # variant, dtype or arch, oracle
_COMPILER = "compiler"
_POWER = "power"


@dataclass(frozen=True)
class _Judged:
    """What an oracle, or the compiler, said at one place: cases, failures, and the worst value of
    each measure."""

    cases: int
    failures: int
    worst: dict[str, float]


@dataclass(frozen=True)
class Change:
    """The worst value of one measure in two reports.  ratio = new / old."""

    variant: str
    dtype: str
    oracle: str
    measure: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        if self.old == self.new or statistics.badness(self.old) == statistics.badness(self.new):
            return 1.0
        if math.isnan(self.new):
            return math.inf
        if math.isnan(self.old) or math.isinf(self.old):
            return 0.0
        return math.inf if self.old == 0 else self.new / self.old


@dataclass(frozen=True, kw_only=True)
class ReportComparison:
    """What changed from an old report to a new one.  Places are (variant, dtype, oracle), bins
    (variant, dtype, bin).

    An oracle that is not called like its group is named with it: "memory (poison)".  Builds are the
    places (variant, arch, "compiler"); their measure is what the worst of them spills.  What a
    campaign certifies to notice is of the places (variant, dtype, "power"): larger is worse, and a
    class without a certificate any more is infinitely worse.

    worse, better: the worst value rose or fell by more than `threshold`.  stale: variants whose
    source hash differs, so that the old report says nothing of the new source.  gone: judged in the
    old report, not in the new one.
    """

    old: str
    new: str
    same_device: bool
    threshold: float
    worse: tuple[Change, ...] = ()
    better: tuple[Change, ...] = ()
    newly_failing: tuple[Place, ...] = ()
    newly_passing: tuple[Place, ...] = ()
    gone: tuple[Place, ...] = ()
    newly_covered: tuple[Place, ...] = ()
    newly_uncovered: tuple[Place, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def regressed(self) -> bool:
        """Something fails that did not, is worse, or is no longer looked at."""
        return bool(
            self.worse or self.newly_failing or self.gone or self.newly_uncovered or self.removed
        )


def compare(old: Report, new: Report, threshold: float = THRESHOLD) -> ReportComparison:
    """Compare two reports; raises ReportError for a threshold that is not above 1."""
    if not threshold > 1:
        raise ReportError(f"threshold: {threshold} is not above 1, the ratio of equal results")
    before, after = ({v["ref"]: v for v in report["variants"]} for report in (old, new))
    both = sorted(before.keys() & after.keys())
    places = tuple(
        _places(found[ref] for ref in both) | _powers(report, both)
        for found, report in ((before, old), (after, new))
    )
    bins = (_bins(before[ref] for ref in both), _bins(after[ref] for ref in both))
    shared = sorted(places[0].keys() & places[1].keys())
    changes = [
        change for place in shared for change in _changes(place, places[0][place], places[1][place])
    ]
    return ReportComparison(
        old=_title(old),
        new=_title(new),
        same_device=_same_device(old["device"], new["device"]),
        threshold=threshold,
        worse=tuple(c for c in changes if c.ratio > threshold),
        better=tuple(c for c in changes if c.ratio < 1 / threshold),
        newly_failing=tuple(
            p for p in sorted(places[1]) if places[1][p].failures and not _failed(places[0].get(p))
        ),
        newly_passing=tuple(p for p in shared if places[0][p].failures and _passed(places[1][p])),
        gone=tuple(
            p for p in sorted(places[0]) if places[0][p].cases and not _judged(places[1].get(p))
        ),
        newly_covered=tuple(sorted(bins[1] - bins[0])),
        newly_uncovered=tuple(sorted(bins[0] - bins[1])),
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        stale=tuple(ref for ref in both if before[ref]["source_hash"] != after[ref]["source_hash"]),
    )


def _same_device(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """By folder name; by name where one report is of the days when every CPU of a kind was called
    alike ("cpu-x86_64")."""
    slugs = [str(device.get("slug")) for device in (old, new)]
    coarse = any(slug in ("cpu-x86_64", "cpu-aarch64", "cpu-arm64") for slug in slugs)
    return slugs[0] == slugs[1] or (
        coarse and bool(old.get("name")) and old.get("name") == new.get("name")
    )


def _title(report: Report) -> str:
    return f"{report['device'].get('slug', 'unknown device')} {report['run']}"


def _places(variants: Iterable[VariantReport]) -> dict[Place, _Judged]:
    found: dict[Place, _Judged] = {}
    for v in variants:
        found |= {
            (v["ref"], d["dtype"], _oracle_name(o)): _by_oracle(o)
            for d in v["dtypes"]
            for o in d["oracles"]
        }
        for b in v["builds"]:
            spill = {"spill": float(b["spill_stores"] + b["spill_loads"])}
            place = (v["ref"], b["arch"], _COMPILER)
            found[place] = _Judged(b["compiled"] + len(b["failing"]), len(b["failing"]), spill)
    return found


def _powers(report: Report, refs: Iterable[str]) -> dict[Place, _Judged]:
    """The certified strengths of each (variant, dtype) that has any."""
    found: dict[Place, _Judged] = {}
    for one in report.get("power", []):
        place = (one["variant"], one["dtype"], _POWER)
        if one["variant"] in refs and one["fault"] in FAULTS:
            earlier = found.get(place, _Judged(0, 0, {}))
            worst = earlier.worst | {f"power_{one['fault']}": one["strength"]}
            found[place] = _Judged(max(earlier.cases, one["cases"]), 0, worst)
    return found


def _by_oracle(oracle: Oracle) -> _Judged:
    ratios = oracle.get("r", {})
    worst = {f"r_{name}": ratios[name] for name in TENSORS if name in ratios}
    if (spread := oracle.get("lse_ulp")) is not None:
        worst["lse_ulp"] = spread["maximum"]
    return _Judged(oracle["cases"], oracle["failures"], worst)


def _oracle_name(oracle: Oracle) -> str:
    """Some oracles sit in several groups: what memory says of accuracy cases is not what it says of
    poisoned ones."""
    name, group = oracle["oracle"], oracle["group"]
    return name if name == group else f"{name} ({group})"


def _bins(variants: Iterable[VariantReport]) -> set[Place]:
    return {
        (v["ref"], d["dtype"], name)
        for v in variants
        for d in v["dtypes"]
        for name, cases in d["bins"].items()
        if cases
    }


def _failed(judged: _Judged | None) -> bool:
    return judged is not None and judged.failures > 0


def _judged(judged: _Judged | None) -> bool:
    return judged is not None and judged.cases > 0


def _passed(judged: _Judged) -> bool:
    return judged.cases > 0 and judged.failures == 0


def _changes(place: Place, old: _Judged, new: _Judged) -> Iterator[Change]:
    for measure, was in old.worst.items():
        if measure not in new.worst and place[-1] != _POWER:
            continue
        now = new.worst.get(measure, math.inf)
        if statistics.badness(max(was, now, key=statistics.badness)) > (False, FLOORS[measure]):
            yield Change(*place, measure, was, now)


def render_comparison(
    comparison: ReportComparison, form: Literal["text", "markdown"] = "text", width: int = 100
) -> str:
    """The comparison for a terminal (ANSI colours are left to the caller's console: none here) or
    as Markdown."""
    page = _document(comparison)
    return markdown.render(page) if form == "markdown" else terminal.page(page, width)


def _document(found: ReportComparison) -> Document:
    """A table of everything that is not empty, the bad news first."""
    place, bins = ("variant", "dtype or arch", "oracle"), ("variant", "dtype", "bin")
    change = (*place, "measure", "old", "new", "ratio")
    by = f"(by more than {found.threshold:g})"
    stale = "Source changed: the old report is stale for"
    tables: list[tuple[str, tuple[str, ...], Sequence[Row]]] = [
        ("Newly failing", place, found.newly_failing),
        (f"Worse {by}", change, [*map(_row, found.worse)]),
        ("No longer judged", place, found.gone),
        ("Bins no longer covered", bins, found.newly_uncovered),
        ("Variants removed", ("variant",), [(ref,) for ref in found.removed]),
        (stale, ("variant",), [(ref,) for ref in found.stale]),
        ("Newly passing", place, found.newly_passing),
        (f"Better {by}", change, [*map(_row, found.better)]),
        ("Bins newly covered", bins, found.newly_covered),
        ("Variants added", ("variant",), [(ref,) for ref in found.added]),
    ]
    sections = tuple(
        Section(title, "", (Table(columns, tuple(rows)),))
        for title, columns, rows in tables
        if rows
    )
    verdict = "regressed" if found.regressed else "no regression"
    lead = (
        "The reports are of different devices: their arithmetic, and so their errors, may rightly"
        " differ."
    )
    return Document(
        f"{found.old} -> {found.new}: {verdict}",
        () if found.same_device else (Paragraph(lead),),
        sections,
    )


def _row(change: Change) -> Row:
    measure = words.MEASURES[change.measure]
    numbers = map(Number, (change.old, change.new, change.ratio))
    return change.variant, change.dtype, change.oracle, measure, *numbers
