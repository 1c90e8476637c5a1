"""`verify bench mutants`: how many mutants of the kernels a minute the suite convicts here."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verify.bundle import ROOT, for_children
from verify.evidence.store import new_run_id
from verify.machine import device
from verify.timing.mutants import MutantRate, MutantRates, parse_rate, per_minute, write

_MODULE = "tests.mutants.rate"


def bench_mutants(console: Console, seconds: float, folder: Path) -> int:
    """Judge the sample for that time at most, print the rates and write mutants.json into the
    folder; returns an exit code: 1 if a mutant is no longer convicted, 3 if none was judged."""
    if not (ROOT / "tests" / "mutants").is_dir():
        console.print(
            "verify bench mutants: an installed wheel has no mutants; run it in a checkout",
            highlight=False,
        )
        return 3
    command = [sys.executable, "-m", _MODULE, str(seconds)]
    environment = for_children(dict(os.environ))
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2]
        console.print(f"verify bench mutants: {last}", highlight=False, markup=False)
        return 3
    rates = [parse_rate(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    record: MutantRates = {
        "schema": 1,
        "run": new_run_id(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.fingerprint(),
        "rates": rates,
    }
    path = write(record, folder)
    console.print(_table(rates))
    console.print(f"{path}", highlight=False, markup=False)
    if not any(one["judged"] for one in rates):
        return 3
    return int(any(one["convicted"] < one["judged"] for one in rates))


def _table(rates: list[MutantRate]) -> Table:
    """A row for each language; the title has the rate of all."""
    judged = sum(one["judged"] for one in rates)
    title = f"{per_minute(rates):.1f} mutants killed a minute, of {judged} judged"
    table = Table("language", "sample", "judged", "convicted", "seconds", "a minute", title=title)
    for one in rates:
        counts = (str(one[name]) for name in ("sample", "judged", "convicted"))
        rate = one["reason"] or f"{per_minute([one]):.1f}"
        table.add_row(one["language"], *counts, f"{one['seconds']:.1f}", rate)
    return table
