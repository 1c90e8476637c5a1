"""Evidence: what a run records on disk, safe under many writer processes and under a kill at any moment.

A run is a directory `<root>/<run_id>/` with one append-only file per writer process, `<worker>.jsonl`, one JSON object per
line.  Each record is one `os.write` to a descriptor opened with O_APPEND: when `Recorder.write` returns, the kernel has the
whole line, so a killed writer loses at most the line that it was writing.  Power loss is not covered (no fsync per record).

`load` reads a directory back, tolerates torn lines and counts them, and joins what several writers said of one case.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from verify import strict_json

SCHEMA_VERSION = 1

R = TypeVar("R")

Outcome = Literal["pass", "fail", "inapplicable"]
Phase = Literal["generate", "shrink", "reuse", "witness"]

# Shrinking walks towards small failing cases, so its verdicts are no sample of anything: they count in no statistic.
COUNTED_PHASES: tuple[Phase, ...] = ("generate", "reuse", "witness")


class EvidenceError(ValueError):
    """A run directory or a record that cannot be used; the message names the file and the line."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Who ran what, where and when.  started: ISO 8601, UTC.  device: `verify.device.fingerprint()`."""

    run: str
    started: str
    profile: str
    device: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class VariantEntry:
    """A variant that the run knew, with its declarations as data (`verify.variant.Variant.describe`)."""

    ref: str
    name: str
    family: str
    path: str
    source_hash: str
    configs: tuple[str, ...]
    support: dict[str, Any]
    numerics: dict[str, Any]
    contract: dict[str, Any]
    entries: tuple[str, ...] = ("forward",)
    gradients: dict[str, Any] | None = None
    unavailable: str | None = None
    undeclared: bool = False


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Written before a launch: a begin that no verdict follows is a case that took its judge with it."""

    case: str
    phase: Phase
    time: float  # seconds since the epoch
    variant: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an oracle holds against a case: got and bound at the worst place, `count` of `total` elements at fault."""

    oracle: str
    message: str
    got: float | str | None = None
    bound: float | str | None = None
    where: str = ""
    count: int = 0
    total: int = 0
    replay: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One oracle's judgement of one case.

    seconds: of generate, run, reference, bound, record.  measures, where the oracle has them (docs/report-schema.md): for T
    of out, lse, dq, dk, dv: r_T (worst error / bound), max_error_T and error_bound_T (the largest error and the bound at that
    element), worst_index_T, worst_reference_T and worst_bound_T (the element with the worst r); rows_T, z2_T, z_T, toward_T,
    slack_T, least_T, share_T (sums over judged rows, docs/statistics.md); bound_ratio (median bound / best bound of that
    dtype), lse_ulp (largest LSE error in fp32 ulp), seqlen_kv.  observed: what an oracle found out that is no number, by the
    name of the property.
    """

    case: str
    variant: str
    config: str
    dtype: str
    oracle: str
    group: str
    outcome: Outcome
    phase: Phase
    problem: str
    seconds: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)
    bins: tuple[str, ...] = ()
    finding: Finding | None = None
    time: float = 0.0  # seconds since the epoch; `Recorder.write` fills it in

    @property
    def counted(self) -> bool:
        return self.phase in COUNTED_PHASES


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How many problems were drawn for a variant, and how many of them its support refused.  Records add up."""

    variant: str
    dtype: str
    group: str
    drawn: int
    refused: int


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A variant (or one dtype of it) that this run did not try, and why."""

    variant: str
    reason: str
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Built:
    """One build of a variant, compiled for `arch` without running it: what the compiler says it needs, or why it failed.

    resources: `verify.variant.Resources` as data; None where compiling failed (`error` says why), or where the build was left
    to a larger profile (`error` is empty).
    """

    variant: str
    arch: str
    build: str
    seconds: float
    resources: dict[str, int] | None
    error: str = ""


Record = Run | VariantEntry | Begin | Verdict | Drawn | NotRun | Built
_KINDS: dict[str, type[Record]] = {
    "run": Run,
    "variant": VariantEntry,
    "begin": Begin,
    "verdict": Verdict,
    "drawn": Drawn,
    "not_run": NotRun,
    "built": Built,
}
_KIND_OF = {record: kind for kind, record in _KINDS.items()}


def new_run_id(now: datetime | None = None) -> str:
    """A directory name that sorts by time and collides with none: 20250131T235959Z-1a2b3c."""
    return f"{(now or datetime.now(UTC)).astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def is_plain(name: str) -> bool:
    """Whether a run or a worker may be called so: a file name, without a path."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


class Recorder:
    """Appends records to `<run_dir>/<worker>.jsonl`; opening an existing file continues it.

    Raises EvidenceError for a worker name that is no plain file name, OSError if the disk refuses.
    """

    def __init__(self, run_dir: Path | str, worker: str = "main") -> None:
        if not is_plain(worker):
            raise EvidenceError(f"worker: {worker!r} is not a plain file name")
        self.path = Path(run_dir) / f"{worker}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _ends_with_newline(self.path):  # a predecessor died in the middle of a line: do not continue it
            os.write(self._fd, b"\n")

    def write(self, record: Record) -> None:
        """Append one record, stamping a verdict that has no time."""
        if self._fd is None:
            raise EvidenceError(f"{self.path}: is closed")
        if isinstance(record, Verdict) and record.time == 0.0:
            record = replace(record, time=time.time())
        line = strict_json.dumps({"kind": _KIND_OF[type(record)], **strict_json.encode(record)})
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            os.write(self._fd, b"\n")
            raise OSError(f"{self.path}: {written} of {len(data)} bytes written; is the disk full?")

    def begin(self, case: str, phase: Phase, variant: str = "") -> None:
        """Say that `case` is about to be launched; call it before the launch."""
        self.write(Begin(case=case, phase=phase, time=time.time(), variant=variant))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Evidence:
    """A run read back.

    verdicts: one per (case, oracle), sorted by it: the last one written, except that a failure is never replaced by a pass.
    unstable: (case, oracle) that both passed and failed.  lost: begun, never judged.  torn: "file:line" of lines cut short.
    builds: one per (variant, arch, build), the last one recorded.
    changed: refs recorded with more than one source hash, whose verdicts therefore do not belong together.
    """

    runs: tuple[Run, ...] = ()
    variants: tuple[VariantEntry, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    unstable: tuple[tuple[str, str], ...] = ()
    lost: tuple[Begin, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    builds: tuple[Built, ...] = ()
    torn: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def run(self) -> Run:
        """The run's first record of itself; raises EvidenceError if there is none."""
        if not self.runs:
            raise EvidenceError("the evidence has no run record: nothing says on what device it was measured")
        return self.runs[0]

    @cached_property
    def judged(self) -> frozenset[str]:
        """Cases with a verdict of any oracle: what a resumed run need not repeat."""
        return frozenset(verdict.case for verdict in self.verdicts)

    @cached_property
    def _by_case(self) -> dict[str, list[Verdict]]:
        found: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            found[verdict.case].append(verdict)
        return dict(found)

    def verdict_of(self, case: str, oracle: str | None = None) -> Verdict | None:
        """That oracle's verdict on a case; without an oracle, a failing verdict if any oracle has one, else the first."""
        found = [v for v in self._by_case.get(case, []) if oracle in (None, v.oracle)]
        return min(found, key=lambda v: v.outcome != "fail", default=None)


def load(run_dir: Path | str) -> Evidence:
    """Read a run directory.

    Raises EvidenceError if it is none, for evidence of another schema version and for a whole line that is not a record.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise EvidenceError(f"{folder}: is no run directory")
    torn: list[str] = []
    records = [record for path in sorted(folder.glob("*.jsonl")) for record in _read(path, torn)]
    verdicts, unstable = _join([r for r in records if isinstance(r, Verdict)])
    hashes: dict[str, set[str]] = defaultdict(set)
    for variant in (r for r in records if isinstance(r, VariantEntry)):
        hashes[variant.ref].add(variant.source_hash)
    return Evidence(
        runs=tuple(sorted((r for r in records if isinstance(r, Run)), key=lambda r: (r.started, r.run))),
        variants=_last(records, VariantEntry, lambda r: (r.ref,)),
        verdicts=verdicts,
        unstable=unstable,
        lost=_lost([r for r in records if isinstance(r, Begin)], {v.case for v in verdicts}),
        drawn=_sum_drawn(r for r in records if isinstance(r, Drawn)),
        not_run=_last(records, NotRun, lambda r: (r.variant, r.dtype, r.reason)),
        builds=_last(records, Built, lambda r: (r.variant, r.arch, r.build)),
        torn=tuple(torn),
        changed=tuple(sorted(ref for ref, found in hashes.items() if len(found) > 1)),
    )


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _read(path: Path, torn: list[str]) -> Iterator[Record]:
    """Records of one file.  A line that does not parse was cut short, by a kill or a full disk, wherever it stands."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            data = strict_json.loads(line.decode("utf-8"))
        except ValueError:
            torn.append(where)
            continue
        yield _record(data, where)


def _record(data: Any, where: str) -> Record:
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise EvidenceError(f"{where}: kind {kind!r} is none of {', '.join(_KINDS)}")
    if kind == "run" and data.get("schema") != SCHEMA_VERSION:
        raise EvidenceError(f"{where}: evidence of schema {data.get('schema')!r}; this version reads {SCHEMA_VERSION}")
    try:
        return strict_json.decode(_KINDS[kind], data, kind)
    except strict_json.ShapeError as error:
        raise EvidenceError(f"{where}: {error}") from None


def _join(verdicts: list[Verdict]) -> tuple[tuple[Verdict, ...], tuple[tuple[str, str], ...]]:
    """One verdict per (case, oracle), and the keys that both passed and failed.

    A case that fails once and then passes is a race or a dependence on memory, which is worse than a plain failure: the
    failure stays.  A case judged while generating and again while shrinking stays counted.
    """
    grouped: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda v: v.time):
        grouped[verdict.case, verdict.oracle].append(verdict)
    joined, unstable = [], []
    for key, found in sorted(grouped.items()):
        failed = [v for v in found if v.outcome == "fail"]
        last = (failed or found)[-1]
        counted = [v.phase for v in found if v.counted]
        joined.append(last if last.counted or not counted else replace(last, phase=counted[0]))
        if failed and any(v.outcome == "pass" for v in found):
            unstable.append(key)
    return tuple(joined), tuple(unstable)


def _lost(begins: list[Begin], judged: set[str]) -> tuple[Begin, ...]:
    last = {begin.case: begin for begin in sorted(begins, key=lambda b: b.time) if begin.case not in judged}
    return tuple(last[case] for case in sorted(last))


def _sum_drawn(records: Iterable[Drawn]) -> tuple[Drawn, ...]:
    drawn: Counter[tuple[str, str, str]] = Counter()
    refused: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        key = (record.variant, record.dtype, record.group)
        drawn[key] += record.drawn
        refused[key] += record.refused
    return tuple(
        Drawn(variant=key[0], dtype=key[1], group=key[2], drawn=drawn[key], refused=refused[key]) for key in sorted(drawn)
    )


def _last(records: Iterable[object], kind: type[R], key: Callable[[R], tuple[str, ...]]) -> tuple[R, ...]:
    """The last record of a kind for every key, in the order of the keys."""
    found = {key(record): record for record in records if isinstance(record, kind)}
    return tuple(found[name] for name in sorted(found))
