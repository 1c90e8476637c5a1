"""bench.json as tables and a page, made from it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verify import document as doc
from verify.document import markdown as page
from verify.document import text
from verify.timing.record import Benchmark, Row, fastest, workload_of
from verify.timing.workloads import BACKWARD, CAUSAL, SOFTMAX, Workload

ROWS = (
    *("workload", "variant", "config", "dtype", "median", "minimum", "p10 to p90", "calls"),
    *("TFLOP/s", "of peak", "op/B", "first of O (dV)", "build"),
)
_BRIEF = ("workload", "variant", "config", "dtype", "median", "TFLOP/s", "of peak", ROWS[11])
_KIND = ("direction", "mask", "batch", "heads", "head_dim")
_OTHER = "another source than this report's"
CONVENTIONS = (
    f"TFLOP/s: 4 B H Sq Skv D operations forward, times {CAUSAL:g} if causal, times {BACKWARD:g}"
    " backward. Of peak: of the device's fastest matrix product of that input dtype, measured in"
    " the same run. op/B: these operations and"
    f" {SOFTMAX} per score for the softmax, per byte that must be read or written once. First: of"
    " the first row of O, backward of dV, on inputs that are the same for all variants."
)


def document(record: Benchmark) -> doc.Document:
    """bench.md."""
    device = record["device"]
    about = ", ".join(str(device[name]) for name in ("name", "driver") if device.get(name))
    lead = doc.Paragraph((f"Suite {record['suite']} on {about}; ", *run(record)))
    return doc.Document("Speed", (lead,), tuple(_sections(record)))


def markdown(record: Benchmark) -> str:
    """bench.md."""
    return page.render(document(record), "bench.json")


def run(record: Benchmark) -> tuple[doc.Inline, ...]:
    """When and how it was measured."""
    protocol = record["protocol"]
    flush = "L2 flushed before each call" if protocol["flushed"] else "no cache flushed"
    rule = (
        f"{protocol['warmups']} warm-ups and {protocol['calls']} timed calls, fewer where"
        f" {protocol['calls']} take more than {protocol['row_seconds']:g} s; {flush}"
    )
    clocks = "; ".join(filter(None, (_clocks(record), _locked(record))))
    took = text.seconds(record["seconds"])
    said = f", {took}. {rule}." + (f" {clocks}." if clocks else "")
    return "run ", doc.Span(record["run"], "code"), said


def _locked(record: Benchmark) -> str:
    locked = record["locked_mhz"]
    return "clocks not locked" if locked is None else f"SM clock locked at {locked} MHz"


def _clocks(record: Benchmark) -> str:
    seen = [one["sm_mhz"] for one in record["clocks"] if one["sm_mhz"] is not None]
    return f"SM clock {' and '.join(f'{mhz:.0f}' for mhz in seen)} MHz" if seen else ""


def _sections(record: Benchmark) -> Iterator[doc.Section]:
    note = doc.Paragraph(CONVENTIONS, note=True)
    yield doc.Section("Device", "device", (peaks(record),))
    best = fastest(record["rows"])
    yield doc.Section("TFLOP/s by length", "lengths", (*by_length(record), note))
    yield doc.Section("Fastest configs", "fastest", (rows(best),))
    others = [row for row in record["rows"] if not any(row is one for one in best)]
    if others:
        yield doc.Section("Other configs", "others", (rows(others),))
    if record["left"]:
        yield doc.Section("Not timed", "left", left(record))


def peaks(record: Benchmark) -> doc.Table:
    """What the device was seen to do, and what the driver says of it."""
    measured: list[doc.Row] = [
        (peak["name"], doc.Number(peak["value"], unit=peak["unit"]), peak["error"] or peak["what"])
        for peak in record["peaks"]
    ]
    told: list[doc.Row] = [
        (name, doc.Number(value, text.count(value)), "as the driver says")
        for name, value in record["units"].items()
    ]
    return doc.Table(("unit", "rate or size", "how"), (*measured, *told))


def by_length(record: Benchmark, sources: Mapping[str, str] | None = None) -> tuple[doc.Block, ...]:
    """TFLOP/s of each variant's fastest config: a table for each direction, mask, batch, heads
    and head dim; the fastest at the longest length first.  Arguments as those of `rows`."""
    groups: dict[tuple[object, ...], dict[tuple[str, str], dict[int, Row]]] = {}
    for row in sorted(fastest(record["rows"]), key=lambda row: workload_of(row["workload"])):
        of = row["workload"]
        group = (*(of[name] for name in _KIND),)  # type: ignore[literal-required]
        names = row["variant"], row["dtype"]
        groups.setdefault(group, {}).setdefault(names, {})[int(of["seqlen"])] = row
    return tuple(
        block for group, found in groups.items() for block in _lengths(group, found, sources or {})
    )


def _lengths(
    group: tuple[object, ...],
    found: Mapping[tuple[str, str], Mapping[int, Row]],
    sources: Mapping[str, str],
) -> Iterator[doc.Block]:
    lengths = sorted({length for rows in found.values() for length in rows})

    def order(names: tuple[str, str]) -> list[float]:
        rows = found[names]
        return [-rows[at]["tflops"] if at in rows else 0.0 for at in reversed(lengths)]

    shown: list[doc.Row] = []
    for variant, dtype in sorted(found, key=order):
        rows = found[variant, dtype]
        old = any(_other_source(row, sources) for row in rows.values())
        name = doc.Span(f"{variant}: {_OTHER}" if old else variant, "bad" if old else "strong")
        cells = (rows[at]["tflops"] if at in rows else None for at in lengths)
        numbers = (doc.Number(one, text.NONE if one is None else text.number(one)) for one in cells)
        shown.append((name, dtype, *numbers))
    direction, mask, batch, heads, head_dim = group
    yield doc.Heading(f"{direction}, {mask}: batch {batch}, {heads} heads, head dim {head_dim}")
    yield doc.Table(("variant", "dtype", *(f"N = {length}" for length in lengths)), tuple(shown))


def _other_source(row: Row, sources: Mapping[str, str]) -> bool:
    return sources.get(row["variant"]) not in (None, row["source_hash"])


def rows(
    found: Sequence[Row], sources: Mapping[str, str] | None = None, *, brief: bool = False
) -> doc.Table:
    """One row per config and workload, the fastest of a workload first; failed ones after them.

    sources: hashes of the sources that a report is of.  brief: for a terminal.
    """
    columns = _BRIEF if brief else ROWS
    shown = [dict(zip(ROWS, _row(row, sources or {}), strict=False)) for row in _ordered(found)]
    # The reason of a row that was not timed stands in its last cell, which spans the rest.
    return doc.Table(
        columns, tuple(tuple(row[name] for name in columns if name in row) for row in shown)
    )


def _ordered(found: Sequence[Row]) -> list[Row]:
    return sorted(found, key=_order)


def _order(row: Row) -> tuple[Workload, bool, float]:
    timed = row["outcome"] == "timed"
    return workload_of(row["workload"]), not timed, row["seconds"]["median"] if timed else 0.0


def _row(row: Row, sources: Mapping[str, str]) -> doc.Row:
    names: doc.Row = (
        workload_of(row["workload"]).name,
        doc.Span(row["variant"], "strong"),
        doc.Span(row["config"], "code"),
        row["dtype"],
    )
    if row["outcome"] != "timed":
        return (*names, doc.Span(row["reason"], "bad" if row["outcome"] == "failed" else "soft"))
    seconds, share = row["seconds"], row["share"]
    band = f"{text.seconds(seconds['p10'])} to {text.seconds(seconds['p90'])}"
    first = ", ".join(f"{value:.4g}" for value in row["first"][:3])
    build: doc.Line = doc.Span(row["build"], "code") if row["build"] else text.NONE
    if _other_source(row, sources):
        build = doc.Span(_OTHER, "bad")
    return (
        *names,
        doc.seconds(seconds["median"]),
        doc.seconds(seconds["minimum"]),
        band,
        doc.count(row["calls"]),
        doc.Number(row["tflops"], text.number(row["tflops"])),
        doc.Number(share, text.NONE if share is None else f"{100 * share:.0f} %"),
        doc.Number(row["intensity"]),
        doc.Span(f"{first}: {row['differs']}", "bad") if row["differs"] else first,
        build,
    )


def left(record: Benchmark) -> tuple[doc.Block, ...]:
    """Variants, configs and dtypes that were not timed, by reason."""
    return doc.left_out(
        (" ".join(filter(None, (one["variant"], one["config"], one["dtype"]))), one["reason"])
        for one in record["left"]
    )
