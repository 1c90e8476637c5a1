"""What explains a kernel's speed, out of ncu's metrics."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verify.profiling.tool import ProfileError

LDSM_CONFLICTS = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"
_PEAK = "avg.pct_of_peak_sustained"


@dataclass(frozen=True)
class Quantity:
    """One number of a profile.

    key: its name in profile.json.  metrics: ncu's names; the first one that has a value counts,
    since they differ between chips and versions.  added: of several metrics, whether they add up.
    """

    key: str
    label: str
    unit: str
    metrics: tuple[str, ...]
    added: bool = False


QUANTITIES = (
    Quantity("duration", "duration", "s", ("gpu__time_duration.sum",)),
    Quantity(
        "tensor_pipe",
        "tensor pipe, of peak",
        "%",
        (
            f"sm__pipe_tensor_cycles_active.{_PEAK}_active",
            f"sm__inst_executed_pipe_tensor.{_PEAK}_active",
            f"sm__pipe_tensor_op_hmma_cycles_active.{_PEAK}_active",
        ),
    ),
    Quantity(
        "issue_slots",
        "issue slots busy",
        "%",
        (f"sm__inst_issued.{_PEAK}_active", f"smsp__issue_active.{_PEAK}_active"),
    ),
    Quantity("sm", "SM throughput, of peak", "%", (f"sm__throughput.{_PEAK}_elapsed",)),
    Quantity("occupancy", "occupancy achieved", "%", (f"sm__warps_active.{_PEAK}_active",)),
    Quantity(
        "occupancy_possible",
        "occupancy possible",
        "%",
        ("sm__maximum_warps_per_active_cycle_pct",),
    ),
    Quantity(
        "l1",
        "L1 throughput, of peak",
        "%",
        (f"l1tex__throughput.{_PEAK}_active", f"l1tex__throughput.{_PEAK}_elapsed"),
    ),
    Quantity("l2", "L2 throughput, of peak", "%", (f"lts__throughput.{_PEAK}_elapsed",)),
    Quantity(
        "dram",
        "DRAM throughput, of peak",
        "%",
        (f"dram__throughput.{_PEAK}_elapsed", f"gpu__dram_throughput.{_PEAK}_elapsed"),
    ),
    Quantity("conflicts_ldsm", "bank conflicts of ldmatrix", "", (LDSM_CONFLICTS,)),
    Quantity(
        "conflicts_ld",
        "bank conflicts of all shared loads",
        "",
        ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
    ),
    Quantity(
        "conflicts_st",
        "bank conflicts of shared stores",
        "",
        ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",),
    ),
    Quantity(
        "local_sectors",
        "sectors of local memory (spills)",
        "",
        (
            "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
            "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
        ),
        added=True,
    ),
    Quantity("registers", "registers per thread", "", ("launch__registers_per_thread",)),
    Quantity(
        "shared",
        "shared memory per block",
        "B",
        ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"),
        added=True,
    ),
    Quantity("waves", "waves per SM", "", ("launch__waves_per_multiprocessor",)),
)
METRICS = tuple(metric for quantity in QUANTITIES for metric in quantity.metrics)
"""All metrics that are asked for: not every set of sections has them."""

_STALL = re.compile(
    r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active\.ratio"
)
_ISSUING = "selected"  # the warp that issues waits for nothing
_LIMIT = re.compile(r"launch__occupancy_limit_(\w+)")
_NAME, _GRID, _BLOCK = "Kernel Name", "Grid Size", "Block Size"
# Of the units that ncu writes with --print-units base, and those that it writes regardless.
_UNITS = {
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "Kbyte/block": 1e3,
    "Mbyte/block": 1e6,
}


@dataclass(frozen=True)
class KernelProfile:
    """One profiled launch.

    values: by key of QUANTITIES; None if ncu did not measure it.  stalls: cycles that a warp waits
    for each reason between two instructions, the longest first.  limits: blocks per SM that each
    resource allows, the fewest first.
    """

    name: str
    grid: str
    block: str
    values: dict[str, float | None]
    stalls: dict[str, float]
    limits: dict[str, float]


def parse(text: str) -> list[KernelProfile]:
    """The launches in ncu's page "raw" as CSV, in their order.

    Raises ProfileError if there are none.
    """
    lines = text.splitlines()
    head = next((at for at, line in enumerate(lines) if line.startswith('"ID",')), None)
    if head is None:
        raise ProfileError(f"ncu printed no table: {text.strip()[-500:]}")
    names, second, *rows = csv.reader(lines[head:])
    units = dict(zip(names, second, strict=False))
    launches = [
        _kernel(dict(zip(names, row, strict=True)), units) for row in rows if len(row) == len(names)
    ]
    if not launches:
        raise ProfileError("ncu profiled no kernel")
    return launches


def _kernel(row: Mapping[str, str], units: Mapping[str, str]) -> KernelProfile:
    numbers = {
        name: value * _UNITS.get(units.get(name, ""), 1.0)
        for name, text in row.items()
        if (value := _number(text)) is not None
    }
    stalls = {why: cycles for why, cycles in _matching(numbers, _STALL) if why != _ISSUING}
    return KernelProfile(
        row[_NAME],
        row[_GRID],
        row[_BLOCK],
        {quantity.key: _value(quantity, numbers) for quantity in QUANTITIES},
        dict(sorted(stalls.items(), key=lambda item: -item[1])),
        dict(sorted(_matching(numbers, _LIMIT), key=lambda item: item[1])),
    )


def _value(quantity: Quantity, numbers: Mapping[str, float]) -> float | None:
    known = [numbers[metric] for metric in quantity.metrics if metric in numbers]
    if not known:
        return None
    return sum(known) if quantity.added else known[0]


def _matching(
    numbers: Mapping[str, float], pattern: re.Pattern[str]
) -> Iterator[tuple[str, float]]:
    for name, value in numbers.items():
        if match := pattern.fullmatch(name):
            yield match[1], value


def _number(text: str) -> float | None:
    """A number with commas between its thousands; None for anything else, such as "n/a"."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
