"""`verify bench kernels`: times the kernels that passed, and returns an exit code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from verify import report as accuracy
from verify.campaign.judged import judged
from verify.campaign.runner import (
    CLEAN,
    FAILED,
    INFRASTRUCTURE,
    USAGE,
    RunnerError,
    interruptible,
    say,
)
from verify.cell.discovery import environment, roster
from verify.cell.process import CROWDED, ForkServer
from verify.cli.bench_selection import Request, last_record, select
from verify.document import terminal
from verify.evidence import new_run_id
from verify.machine import clocks, device
from verify.machine.clocks import ClockError
from verify.machine.cores import cores
from verify.machine.extras import lacking, need
from verify.probes.worker import Job, do_all
from verify.report.speed_plot import speed_plot
from verify.timing import page, peaks
from verify.timing.record import (
    Benchmark,
    Peak,
    Place,
    RecordError,
    Row,
    condensed,
    fastest,
    name_of,
    place_of,
    trouble,
    write,
)
from verify.timing.session import INTERRUPTED, Candidate, Rules, Session, flagged
from verify.timing.trials import ordered, tried
from verify.variant import Declaration

_PATIENCE = 60.0  # seconds for one peak
_MOST_PROCESSES = 16  # that load and compile at the same time
_KEPT_EVERY = 20.0  # seconds


def bench_kernels(request: Request, console: Console) -> int:
    """Time the kernels, write the record and show it; returns an exit code."""
    begun = time.monotonic()
    if request.published is not None:
        need("matplotlib")
    listed = roster(list(request.kernels) or None)
    if request.kernels and listed.unusable:
        say(console, f"verify: {listed.unusable}")
        return USAGE
    if listed.lacking:
        raise RunnerError(listed.lacking)
    before = clocks.reading()
    try:
        with clocks.locked(request.lock_mhz), interruptible():
            record = _measured(request, listed.declarations, console)
    except ClockError as error:
        say(console, f"verify: --lock-clocks: {error}")
        return USAGE
    except RecordError as error:
        say(console, f"verify: --continue: {error}")
        return USAGE
    if not fastest(record["rows"]):
        _show(record, console)
        say(console, "nothing was timed, and nothing written: verify run judges kernels")
        return INFRASTRUCTURE
    record["clocks"] = [before, clocks.reading()]
    record["seconds"] = round(time.monotonic() - begun, 1)
    kept = condensed(record)
    for folder in filter(None, (request.folder, request.published)):
        _publish(kept, folder)
    _show(record, console)
    console.print(f"report: {request.folder / 'bench.md'}", highlight=False)
    return _status(record, {each.ref for each in listed.declarations})


def _measured(request: Request, declarations: Sequence[Declaration], console: Console) -> Benchmark:
    found = device.fingerprint()
    last = last_record(request)
    candidates, left = select(request, declarations, judged(declarations, found))
    before = last if request.resume and last is not None and _is_of(request, last, found) else None
    kept = _kept(before, candidates) if before is not None else {}
    beside = _beside(before, declarations) if before is not None else []
    record: Benchmark = {
        "schema": 1,
        "run": new_run_id(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": found,
        "suite": request.named,
        "protocol": {"calls": 0, "warmups": 0, "row_seconds": 0, "flushed": 0},
        "units": {},
        "peaks": [],
        "clocks": [],
        "locked_mhz": request.lock_mhz,
        "seconds": 0.0,
        "rows": [*beside, *kept.values()],
        "left": left,
        "trials": [],
    }
    if before is not None and record["rows"]:  # what is timed now is beside these
        record |= {name: before[name] for name in ("protocol", "units", "peaks")}  # type: ignore[typeddict-item]
        record["trials"] = before.get("trials", [])
    if any(_place(one) not in kept for one in candidates):
        record["peaks"], record["units"] = _peaks(console)
        _time(request, candidates, last, record, console)
    return record


def _is_of(request: Request, last: Benchmark, found: dict[str, Any]) -> bool:
    """Whether a record is of this device, and of as many calls."""
    calls = last["protocol"]["calls"]
    return last["device"].get("slug") == found["slug"] and calls == request.calls


def _kept(last: Benchmark, candidates: Sequence[Candidate]) -> dict[Place, Row]:
    """The rows of a record that are timed candidates of the same sources."""
    asked = {_place(one): one.declaration.source_hash for one in candidates}
    rows = {place_of(row): row for row in last["rows"] if row["outcome"] == "timed"}
    return {key: row for key, row in rows.items() if asked.get(key) == row["source_hash"]}


def _beside(last: Benchmark, declarations: Sequence[Declaration]) -> list[Row]:
    """The rows of a record whose variants are not among these."""
    asked = {declaration.ref for declaration in declarations}
    return [row for row in last["rows"] if row["variant"] not in asked]


def _place(one: Candidate) -> Place:
    return one.declaration.ref, one.config.name, one.dtype, one.workload


def _peaks(console: Console) -> tuple[list[Peak], dict[str, int]]:
    """What the device can do, measured in a process of its own."""
    kind = environment().device
    listed = peaks.listed(kind)
    jobs: list[Job[Any]] = [Job(peaks.measure, (kind, peak["name"])) for peak in listed]
    answers = list(do_all([*jobs, Job(peaks.units, (kind,))], 1, _PATIENCE))
    for peak, answer in zip(listed, answers, strict=False):
        peak["value"], peak["error"] = answer.result, answer.failure
        shown = answer.failure or f"{answer.result:,.4g} {peak['unit']}"
        console.print(f"{peak['name']}: {shown}", highlight=False, markup=False)
    return listed, answers[-1].result or {}


def _time(
    request: Request,
    candidates: Sequence[Candidate],
    last: Benchmark | None,
    record: Benchmark,
    console: Console,
) -> None:
    """Time the candidates that the record has no row of, and put the rows and how they were timed
    into it."""
    total = request.suite.total if request.total is None else request.total
    rules = Rules(calls=request.calls, row_seconds=request.suite.row_seconds, total=total)
    fork_server = ForkServer(environment())
    session = Session(fork_server, rules, peaks.matrix_peaks(record["peaks"]))
    rows = list(record["rows"])
    kept = set(map(place_of, rows))
    try:
        begun = time.monotonic()
        # Variants with all rows kept have no process: nothing of them is tried.
        refs = {one.declaration.ref for one in candidates if _place(one) not in kept}
        candidates = [one for one in candidates if one.declaration.ref in refs]
        session.prepare(
            [one for one in candidates if _place(one) not in kept],
            max(1, min(_MOST_PROCESSES, cores())),
        )
        loaded = time.monotonic()
        limit = None if total is None else total / 3
        record["trials"] = [
            *(one for one in record.get("trials", ()) if one["variant"] not in refs),
            *tried(session, candidates, last, limit),
        ]
        wanted = ordered(
            candidates,
            {**(last or record), "trials": record["trials"]},
            only_best=request.only_best,
        )
        wanted = [one for one in wanted if _place(one) not in kept]
        console.print(
            f"{len(wanted)} rows; loaded and compiled in {loaded - begun:.0f} s, configs tried in"
            f" {time.monotonic() - loaded:.0f} s",
            highlight=False,
        )
        if total is not None:
            session.rules = replace(rules, total=total - (time.monotonic() - loaded))
        whole = len(rows) + len(wanted)
        with console.status("timing") as status:
            written = time.monotonic()
            for row in session.rows(wanted):
                rows.append(row)
                if time.monotonic() - written > _KEPT_EVERY:
                    written = time.monotonic()
                    _keep(record, rows, session, request.folder)
                status.update(f"timing: {len(rows)} of {whole}, {row['variant']}")
    finally:
        session.close()
        fork_server.close()
    _fill(record, rows, session)


def _fill(record: Benchmark, rows: Sequence[Row], session: Session) -> None:
    """Put into the record what the session has timed, and how."""
    record["rows"] = flagged(rows)
    record["protocol"] = {
        "calls": session.rules.calls,
        "warmups": session.rules.warmups,
        "row_seconds": session.rules.row_seconds,
        "flushed": session.flushed,
    }


def _keep(record: Benchmark, rows: Sequence[Row], session: Session, folder: Path) -> None:
    """Write the rows that there are, for `--continue` if this process is killed."""
    now = record.copy()
    _fill(now, rows, session)
    kept = condensed(now)
    write(kept, folder, page.markdown(kept))


def _publish(record: Benchmark, folder: Path) -> None:
    """Write the record, its page and its plot; if the folder holds an accuracy report, write it
    again, so that it includes them."""
    write(record, folder, page.markdown(record))
    if lacking("matplotlib") is not None:
        (folder / "bench.svg").unlink(missing_ok=True)
        accuracy.render_again(folder)
        return
    picture = speed_plot(record)
    if picture is not None:
        shown = picture.replace('style="', 'style="background: white; ', 1)
        (folder / "bench.svg").write_text(shown, encoding="utf-8")
    accuracy.render_again(folder)


def _show(record: Benchmark, console: Console) -> None:
    if record["peaks"]:
        console.print(terminal.render(page.peaks(record), "device"))
    if record["rows"]:
        table = page.rows(fastest(record["rows"]), brief=True)
        console.print(terminal.render(table, "fastest judged config of each variant"))
        say(console, page.CONVENTIONS)
    reasons = Counter(row["reason"] for row in record["rows"] if row["outcome"] == "left")
    for reason, count in reasons.items():
        console.print(f"{count} rows left: {reason}", style="dim", markup=False, highlight=False)
    for one in record["left"]:
        names = " ".join(filter(None, (one["variant"], one["config"], one["dtype"])))
        line = f"{names}: not timed: {one['reason']}"
        console.print(line, style="dim", markup=False, highlight=False)
    for row in record["rows"]:
        if bad := trouble(row):
            where = f"{row['variant']} {row['config']} {row['dtype']}, {name_of(row)}"
            console.print(f"{where}: {bad}", style="bold red", markup=False, highlight=False)


def _status(record: Benchmark, asked: Collection[str]) -> int:
    """FAILED if a row of these variants failed, but for memory or a busy device, or its values
    differ; INFRASTRUCTURE if the run was interrupted."""
    for row in record["rows"]:
        if row["variant"] not in asked:
            continue
        failed = row["outcome"] == "failed" and not row["reason"].startswith(CROWDED)
        if failed or row.get("differs"):
            return FAILED
    interrupted = any(row["reason"] == INTERRUPTED for row in record["rows"])
    return INFRASTRUCTURE if interrupted else CLEAN
