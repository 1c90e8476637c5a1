"""bench.json as typed data: what one run of `verify bench kernels` measured on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NotRequired, TypedDict, cast

from verify.brief import counted, short
from verify.evidence.strict_json import (
    Free,
    Integer,
    Number,
    completed,
    decode,
    dumps,
    loads,
    shortened,
)
from verify.timing.workloads import Workload

SCHEMA_VERSION: Final = 1
NAME: Final = "bench.json"
_EMPTY: Final = {"build": "", "reason": ""}

Outcome = Literal["timed", "failed", "left"]


class RecordError(ValueError):
    """A bench.json that cannot be read; one line."""


class Shape(TypedDict):
    """A workload: heads of Q and K, queries and keys are as many."""

    direction: Literal["forward", "backward"]
    batch: Integer
    heads: Integer
    seqlen: Integer
    head_dim: Integer
    mask: Literal["full", "causal"]


class Seconds(TypedDict):
    """Of the timed calls."""

    median: Number
    minimum: Number
    p10: Number
    p90: Number


class Row(TypedDict):
    """One config of a variant on one workload.

    build: the listed build that it belongs to, or "" where none of the listed ones is it.
    outcome: "failed": the call crashed, hung, raised or was out of memory; "left": there was no
    time for it; reason says it.  The keys from `calls` on are there if it was timed.
    share: of the device's measured matrix peak for the inputs' dtype, null where that is unknown.
    intensity: operations per byte of device memory, the softmax's among them.
    first, last: values of the first and of the last row of O (backward: of dV); rms: root mean
    square of each of the two rows.  differs: how they differ from those of the other variants on
    the same inputs; "" if they do not.
    A file leaves out a build, a reason or a differs that is "".
    """

    variant: str
    family: str
    source_hash: str
    config: str
    build: NotRequired[str]
    dtype: str
    workload: Shape
    outcome: Outcome
    reason: NotRequired[str]
    calls: NotRequired[Integer]
    warmups: NotRequired[Integer]
    seconds: NotRequired[Seconds]
    tflops: NotRequired[Number]
    share: NotRequired[Number | None]
    intensity: NotRequired[Number]
    first: NotRequired[list[Number]]
    last: NotRequired[list[Number]]
    rms: NotRequired[list[Number]]
    differs: NotRequired[str]


Place = tuple[str, str, str, Workload]  # variant, config, dtype, workload


class Peak(TypedDict):
    """What the device was seen to do.  value: null where it could not be measured; error says
    why."""

    name: str
    what: str
    value: Number | None
    unit: str
    error: str


class Clocks(TypedDict):
    """What nvidia-smi says at one moment; null where it says nothing."""

    sm_mhz: Number | None
    memory_mhz: Number | None
    watts: Number | None
    celsius: Number | None


class Left(TypedDict):
    """A variant, or one config or dtype of it, of which no row was timed, or not those that
    `reason` counts."""

    variant: str
    config: str
    dtype: str
    reason: str


class Trial(TypedDict):
    """A short trial of a variant's configs, by which the first one is chosen for all workloads of
    the same direction, head dim and mask, and of as many heads in all if they have none of their
    own.

    workload: on which they were tried.  seconds: median of a few calls by config; those that did
    not work are not there.
    """

    variant: str
    source_hash: str
    dtype: str
    workload: Shape
    seconds: dict[str, Number]


class Protocol(TypedDict):
    """calls, warmups: of a row, fewer where one call is long; row_seconds: for its timed calls;
    flushed: bytes of the L2 cache that is flushed before each call, 0 where none is."""

    calls: Integer
    warmups: Integer
    row_seconds: Number
    flushed: Integer


class Benchmark(TypedDict):
    """One run.  clocks: before and after it; locked_mhz: null where clocks were not locked.

    trials: of variants with several configs.  best: only in records of an earlier version.
    """

    schema: Literal[1]
    run: str
    started: str
    device: dict[str, Free]
    suite: str
    protocol: Protocol
    units: dict[str, Integer]
    peaks: list[Peak]
    clocks: list[Clocks]
    locked_mhz: Integer | None
    seconds: Number
    rows: list[Row]
    left: list[Left]
    trials: NotRequired[list[Trial]]
    best: NotRequired[list[Free]]


def shape_of(workload: Workload) -> Shape:
    """A workload as the record holds it."""
    return {
        "direction": workload.direction,
        "batch": workload.batch,
        "heads": workload.heads,
        "seqlen": workload.seqlen,
        "head_dim": workload.head_dim,
        "mask": workload.mask,
    }


def workload_of(shape: Shape) -> Workload:
    """The workload in a record."""
    return Workload(**shape)


def place_of(row: Row) -> Place:
    """What two records hold of one row alike."""
    return row["variant"], row["config"], row["dtype"], workload_of(row["workload"])


def name_of(row: Row) -> str:
    """The row's workload in words."""
    return workload_of(row["workload"]).name


def trouble(row: Row) -> str:
    """Why a row failed, or how its values differ; "" if neither."""
    return row["reason"] if row["outcome"] == "failed" else row.get("differs", "")


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Of the timed rows the fastest per workload, variant and dtype, in the order in which they
    were met.  Rows whose values differ do not count."""
    found: dict[tuple[Workload, str, str], Row] = {}
    for row in rows:
        if row["outcome"] != "timed" or row["differs"]:
            continue
        key = (workload_of(row["workload"]), row["variant"], row["dtype"])
        if key not in found or row["seconds"]["median"] < found[key]["seconds"]["median"]:
            found[key] = row
    return list(found.values())


def best_config(
    record: Benchmark | None, variant: str, dtype: str, workload: Workload
) -> str | None:
    """The config that a record found fastest on this workload, by their rows if it timed several,
    or else by a trial of this direction, head dim and mask; or the one that it timed, or None."""
    if record is None:
        return None
    rows = [
        row
        for row in record["rows"]
        if (row["variant"], row["dtype"]) == (variant, dtype)
        and workload_of(row["workload"]) == workload
    ]
    timed = [row["config"] for row in fastest(rows)]
    tried = chosen(record.get("trials", ()), variant, dtype, workload)
    if len({row["config"] for row in rows}) > 1 and timed:
        return timed[0]
    return tried or next(iter(timed), None)


def chosen(trials: Iterable[Trial], variant: str, dtype: str, workload: Workload) -> str | None:
    """The fastest config of the trial that stands for this workload, or None if there is none: of
    those of its kind, that of the nearest number of heads in all."""
    mine = [one for one in trials if (one["variant"], one["dtype"]) == (variant, dtype)]
    tried = [(workload_of(one["workload"]), one["seconds"]) for one in mine]
    alike = [(other, seconds) for other, seconds in tried if other.kind == workload.kind]
    if not alike:
        return None

    def distance(other: Workload) -> float:
        pair = other.heads_in_all, workload.heads_in_all
        return max(pair) / min(pair)

    _, seconds = min(alike, key=lambda one: distance(one[0]))
    return min(seconds, key=lambda config: float(seconds[config]))


def read(path: Path) -> Benchmark:
    """The record in a file, or in bench.json of a folder.  Raises RecordError."""
    file = path / NAME if path.is_dir() else path
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file}: {error}") from None


def parse(text: str) -> Benchmark:
    """The record in a text, with the empty texts that a file leaves out.  Raises ValueError (a
    ShapeError names the place)."""
    record = decode(Benchmark, loads(text), "bench")
    return {**record, "rows": [_filled(row) for row in record["rows"]]}


def _filled(row: Row) -> Row:
    usual = _EMPTY | ({"differs": ""} if row["outcome"] == "timed" else {})
    return cast(Row, completed(Row, row, usual))


def condensed(record: Benchmark) -> Benchmark:
    """The record as it is kept: numbers to six digits, and no rows that were not tried.  `left`
    counts these by variant and dtype: a suite has thousands, and short runs reach hundreds."""
    tried, configs = [], defaultdict[tuple[str, str, str], list[str]](list)
    for row in record["rows"]:
        if row["outcome"] == "left":
            configs[row["variant"], row["dtype"], row["reason"]].append(row["config"])
        else:
            tried.append(_short(row))
    left: list[Left] = []
    for (variant, dtype, reason), found in configs.items():
        many = f"{counted(len(found), 'row')} of {counted(len(set(found)), 'config')}"
        left.append(
            {"variant": variant, "config": "", "dtype": dtype, "reason": f"{many}: {reason}"}
        )
    return {**record, "rows": tried, "left": record["left"] + left}


def _short(row: Row) -> Row:
    if row["outcome"] != "timed":
        return row
    return cast(Row, _rounded(row))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return short(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def write(record: Benchmark, folder: Path, page: str) -> list[Path]:
    """Write bench.json and bench.md, which is `page`, into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / NAME, folder / "bench.md"]
    rows = [shortened(row, _EMPTY | {"differs": ""}) for row in record["rows"]]
    paths[0].write_text(dumps({**record, "rows": rows}, depth=2) + "\n", encoding="utf-8")
    paths[1].write_text(page, encoding="utf-8", errors="backslashreplace")
    return paths
