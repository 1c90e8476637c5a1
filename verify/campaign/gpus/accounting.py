"""Accounting: what each GPU of a run did and how long it was at work, from its evidence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.table import Column, Table

from verify.campaign.gpus import state
from verify.evidence.records import OF_VERDICTS

_FILE = "accounting.json"


class Account(msgspec.Struct, frozen=True):
    """One GPU's.

    workers: that recorded something.  cases: begun.  failing: failing verdicts.  busy: seconds in
    cases, of all its workers.  controls: control problems that were right.  quarantined: why, or
    "".
    """

    device: str
    workers: int
    cases: int
    failing: int
    busy: float
    controls: int = 0
    quarantined: str = ""


class _Line(msgspec.Struct):
    """What counts of a line of evidence."""

    kind: str = ""
    case: str = ""
    outcome: str = ""
    time: float = 0.0


_DECODER = msgspec.json.Decoder(_Line)


def accounts(run: Path) -> list[Account]:
    """One for each GPU of a run, in the order in which they came."""
    found = []
    for name, gpu in state.read(run).items():
        files = state.files_of(run, name, out=bool(gpu.quarantined))
        counts = [_counted(path) for path in files]
        found.append(
            Account(
                device=name,
                workers=len({path.name.partition(".")[0] for path in files}),
                cases=sum(cases for cases, _, _ in counts),
                failing=sum(failing for _, failing, _ in counts),
                busy=round(sum(busy for _, _, busy in counts), 3),
                controls=gpu.controls,
                quarantined=gpu.quarantined,
            )
        )
    return found


def remember(run: Path) -> list[Account]:
    """Write a run's accounts into its directory, if it has GPUs, and return them."""
    found = accounts(run)
    if found:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        (run / _FILE).write_bytes(text + b"\n")
    return found


def table(found: Iterable[Account]) -> Table:
    """The accounts as a table."""
    rows = Table(
        Column("GPU", overflow="fold"),
        *(Column(name, justify="right") for name in ("workers", "cases", "failing", "busy")),
        Column("controls", justify="right"),
        "state",
    )
    for each in found:
        rows.add_row(
            each.device,
            *map(str, (each.workers, each.cases, each.failing)),
            f"{each.busy:.0f} s",
            str(each.controls),
            f"quarantined: {each.quarantined}" if each.quarantined else "",
        )
    return rows


def _counted(path: Path) -> tuple[int, int, float]:
    """Cases begun in a file of evidence, failing verdicts, and seconds from each begin to the last
    verdict that follows it."""
    cases, failing, busy = 0, 0, 0.0
    begun = last = 0.0
    with path.open("rb") as lines:
        for line in lines:
            try:
                said = _DECODER.decode(line)
            except msgspec.MsgspecError:  # cut short
                continue
            if said.kind == "begin":
                busy += max(last - begun, 0.0)
                begun = last = said.time
                cases += 1
            elif said.kind in OF_VERDICTS:
                last = max(last, said.time)
                failing += said.outcome == "fail"
    return cases, failing, busy + max(last - begun, 0.0)
