"""Evidence read back: one run, or several runs of one device as one."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from verify.evidence.apart import read_files
from verify.evidence.joining import joined, joined_with
from verify.evidence.records import (
    Begin,
    Built,
    Drawn,
    EvidenceError,
    NotRun,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.evidence.run_records import LeftOut, RunRecords, keep_newest_sources
from verify.evidence.tables import Table, together
from verify.evidence.verdicts import Verdicts

R = TypeVar("R")


@dataclass(frozen=True)
class Evidence:
    """A run read back, or several as one.

    verdicts: one per (case, oracle), sorted by it: the last one written, except that a failure is
    never replaced by a pass; any that are given become `Verdicts`.  unstable: (case, oracle) that
    both passed and failed.  lost: begun, never judged, and nothing ended the run meanwhile.
    interrupted: begun last in a run that was ended then, and never judged.  torn: "file:line" of
    lines cut short. builds: one per (variant, arch, build), the last one recorded.  changed: refs
    recorded with more than one source hash by one run, or by runs that began together, whose
    verdicts therefore do not belong together.  left_out: what runs recorded of sources that a later
    run knew another version of; it is in no other field.  ended: runs that somebody ended, or their
    time did, before they had asked everything.
    """

    runs: tuple[RunInfo, ...] = ()
    variants: tuple[VariantEntry, ...] = ()
    verdicts: Verdicts = field(default_factory=Verdicts)
    unstable: tuple[tuple[str, str], ...] = ()
    lost: tuple[Begin, ...] = ()
    interrupted: tuple[Begin, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    builds: tuple[Built, ...] = ()
    torn: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    ended: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdicts", Verdicts.of(self.verdicts))

    @property
    def run(self) -> RunInfo:
        """The run's first record of itself; raises EvidenceError if there is none."""
        if not self.runs:
            raise EvidenceError(
                "the evidence has no run record: nothing says on what device it was measured"
            )
        return self.runs[0]

    def with_verdicts(self, verdicts: Iterable[Verdict]) -> Evidence:
        """Joined with further verdicts, as if they were recorded now."""
        now = [replace(verdict, time=time.time()) for verdict in verdicts]
        if not now:
            return self
        both, unstable = joined_with(self.verdicts, now)
        return replace(self, verdicts=both, unstable=tuple(sorted({*self.unstable, *unstable})))

    @property
    def judged(self) -> frozenset[str]:
        """Cases with a verdict of any oracle: what a resumed run need not repeat."""
        return self.verdicts.cases

    @cached_property
    def _rows(self) -> dict[str, list[tuple[Table, int]]]:
        found: dict[str, list[tuple[Table, int]]] = {}
        for table in self.verdicts.tables:
            for row, case in enumerate(table.cases):
                found.setdefault(case, []).append((table, row))
        return found

    def verdict_of(self, case: str, oracle: str | None = None) -> Verdict | None:
        """That oracle's verdict on a case; without an oracle, a failing verdict if any oracle has
        one, else the first."""
        found = [
            table.verdict(row, place)
            for table, row in self._rows.get(case, [])
            for place, said in enumerate(table.shape.said)
            if oracle in (None, said.oracle)
        ]
        return min(found, key=lambda v: (v.outcome != "fail", v.oracle), default=None)


def load(*run_dirs: Path | str) -> Evidence:
    """Read a run directory, or several as one, in whatever order they are named; their runs are
    then called by directory.  Of each variant, several runs give the evidence of its newest source.

    Raises EvidenceError if one is none, for evidence of another schema version and for a whole line
    that is not a record; of several also if one has no run record or two hold the same run.

    The last large evidence is kept: the end of a campaign asks for it several times, and gets it
    again as long as no file has changed.
    """
    folders = [*{Path(run_dir).resolve(): Path(run_dir) for run_dir in run_dirs}.values()]
    files = tuple(file for folder in folders for file in _files(folder))
    key = tuple((folder.absolute(), (folder / ENDED).exists()) for folder in folders), files
    if key not in _kept:
        evidence = _read(folders)
        _kept.clear()
        if sum(file.size for file in files) < _LARGE:
            return evidence
        _kept[key] = evidence
    return _kept[key]


ENDED = "interrupted"  # a file in the directory of a run that was ended
_LARGE = 16 << 20  # bytes: they take about 0.2 s


@dataclass(frozen=True)
class _File:
    """A file of evidence: it says the same as long as this is the same.  state: what the file
    system says of it."""

    path: Path
    size: int
    state: tuple[int, ...]


_kept: dict[tuple[tuple[tuple[Path, bool], ...], tuple[_File, ...]], Evidence] = {}


def _files(folder: Path) -> Iterator[_File]:
    for path in sorted(folder.glob("*.jsonl")):
        found = path.stat()
        state = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        yield _File(path, found.st_size, state)


def _read(folders: Sequence[Path]) -> Evidence:
    """Read run directories, each named once."""
    shared: dict[Any, Any] = {}
    with _no_collection():
        parts = sorted(
            (_folder(path, shared, len(folders) > 1) for path in folders),
            key=attrgetter("begun"),
        )
        if len(parts) > 1:
            _tell_apart(parts)
        return _joined(parts)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector, which would walk a million new records again and again:
    none is in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()  # all of them are old now, so that the next collection does not walk them
            gc.enable()


def _tell_apart(folders: Sequence[RunRecords]) -> None:
    """Call runs by their directories, whatever they were called when they began; raises
    EvidenceError as `load` says."""
    seen: dict[tuple[str, str], Path] = {}
    for folder in folders:
        if not folder.runs:
            raise EvidenceError(
                f"{folder.path}: has no run record: nothing says on what device it was measured"
            )
        for key in {(run.run, run.started) for run in folder.runs}:
            if key in seen:
                raise EvidenceError(
                    f"{seen[key]} and {folder.path} both hold the run {key[0]} of {key[1]}: name"
                    " one of them"
                )
            seen[key] = folder.path
        folder.runs = [replace(run, run=folder.path.name) for run in folder.runs]


def _joined(parts: Sequence[RunRecords]) -> Evidence:
    left_out = keep_newest_sources(parts)
    verdicts, unstable = joined([part.tables for part in parts])
    variants = [entry for part in parts for entry in part.variants]
    begun = any(part.begins for part in parts)
    lost, interrupted = _unjudged(parts, verdicts.cases if begun else frozenset())
    hashes: dict[str, set[str]] = defaultdict(set)
    for entry in variants:
        hashes[entry.ref].add(entry.source_hash)
    return Evidence(
        runs=tuple(
            sorted((r for part in parts for r in part.runs), key=lambda r: (r.started, r.run))
        ),
        variants=_last(variants, lambda r: (r.ref,)),
        verdicts=verdicts,
        unstable=unstable,
        lost=lost,
        interrupted=interrupted,
        drawn=_sum_drawn(d for part in parts for d in part.drawn),
        not_run=_last(
            (n for part in parts for n in part.not_run), lambda r: (r.variant, r.dtype, r.reason)
        ),
        builds=_last(
            (b for part in parts for b in part.builds), lambda r: (r.variant, r.arch, r.build)
        ),
        torn=tuple(where for part in parts for where in part.torn),
        changed=tuple(sorted(ref for ref, found in hashes.items() if len(found) > 1)),
        left_out=left_out,
        ended=tuple(r.run for part in parts if (part.path / ENDED).exists() for r in part.runs),
    )


def _folder(path: Path, shared: dict[Any, Any], named: bool) -> RunRecords:
    """Read a run directory.  shared: `Packer`'s; named: places in it are called by its name too."""
    if not path.is_dir():
        raise EvidenceError(f"{path}: is no run directory")
    files = sorted(path.glob("*.jsonl"))
    names = {file: f"{path.name}/{file.name}" if named else file.name for file in files}
    found = RunRecords(path)
    parts = [*read_files(names, shared)]
    for part in parts:
        found.add(part)
    found.tables = together(part.tables for part in parts)
    return found


def _unjudged(
    parts: Sequence[RunRecords], judged: AbstractSet[str]
) -> tuple[tuple[Begin, ...], tuple[Begin, ...]]:
    """The last begins of cases that were never judged: of lost ones, and of those that were
    interrupted after it."""
    begins = sorted((b for part in parts for b in part.begins), key=lambda b: b.time)
    last = {begin.case: begin for begin in begins if begin.case not in judged}
    ended: dict[str, float] = {}
    for each in (i for part in parts for i in part.interruptions):
        ended[each.case] = max(each.time, ended.get(each.case, 0.0))
    lost: list[Begin] = []
    interrupted: list[Begin] = []
    for case in sorted(last):
        later = ended.get(case, 0.0) >= last[case].time
        (interrupted if later else lost).append(last[case])
    return tuple(lost), tuple(interrupted)


def _sum_drawn(records: Iterable[Drawn]) -> tuple[Drawn, ...]:
    drawn: Counter[tuple[str, str, str]] = Counter()
    refused: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        key = (record.variant, record.dtype, record.group)
        drawn[key] += record.drawn
        refused[key] += record.refused
    return tuple(
        Drawn(variant=key[0], dtype=key[1], group=key[2], drawn=drawn[key], refused=refused[key])
        for key in sorted(drawn)
    )


def _last(records: Iterable[R], key: Callable[[R], tuple[str, ...]]) -> tuple[R, ...]:
    """The last record for every key, in the order of the keys."""
    found = {key(record): record for record in records}
    return tuple(found[name] for name in sorted(found))
