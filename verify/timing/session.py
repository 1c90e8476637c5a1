"""A timing session: one kernel process per variant, all of them alive, one call at a time.

Each process loads its file and compiles its builds while the others do; then the rows are timed
one after the other.  A process that crashes, hangs or runs out of memory costs its row, and the
next row of its variant gets a fresh one.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median, median_high, quantiles
from typing import Any

from verify.arithmetic.archs import arch_named
from verify.arithmetic.dtypes import dtype_named
from verify.cell.arena import plan
from verify.cell.process import Cell, ForkServer, InfrastructureError, Reply
from verify.problem import Problem
from verify.timing.record import Row, Seconds, shape_of, workload_of
from verify.timing.workloads import Workload
from verify.variant import Config, Declaration

CALLS = 128
WARMUPS = 32
LEAST = 3  # timed calls, however long one is
INTERRUPTED = "interrupted"
_SEED = 20260101
_WARM_SEQLEN = 256  # of the calls that compile
_WARM_HEADS = 2  # not 1, for which a compiler can specialise
# A value may be this many units roundoff of the input format, times the rms of its row, from the
# others; where the row is so small that subnormals round by more, this many half steps of these.
# It is no bound: an honest error is some two units, and a wrong index or a missing key is a
# thousand of them.
_APART = 16


@dataclass(frozen=True)
class Candidate:
    """One config and dtype of a variant on one workload."""

    declaration: Declaration
    config: Config
    dtype: str
    workload: Workload
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class Rules:
    """calls: timed calls of a row, after a quarter as many; row_seconds: for these calls, of which
    there are fewer where one is long (at least LEAST); total: seconds for all rows, or None."""

    calls: int = CALLS
    row_seconds: float = 0.5
    total: float | None = None

    @property
    def warmups(self) -> int:
        return max(1, self.calls * WARMUPS // CALLS)


TRIAL = Rules(calls=8, row_seconds=0.05)


@dataclass
class Session:
    """Times candidates.

    peaks: of matrix products in TFLOP/s, by input dtype.  flushed: bytes of L2, once it is known.
    """

    fork_server: ForkServer
    rules: Rules
    peaks: dict[str, float] = field(default_factory=dict)
    flushed: int = 0
    stopped: str = ""  # why no further row is timed
    _cells: dict[str, Cell] = field(default_factory=dict)
    _builds: dict[str, list[str]] = field(default_factory=dict)

    def close(self) -> None:
        """End all processes."""
        for cell in self._cells.values():
            cell.close()

    def prepare(self, candidates: Sequence[Candidate], processes: int) -> None:
        """Load all variants and compile what the candidates need, in parallel.  Failures show when
        the candidates are timed.  Ctrl-C stops the session."""
        of_variant: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            ref = candidate.declaration.ref
            if ref not in self._cells:
                self._cells[ref] = Cell(self.fork_server)
            of_variant.setdefault(ref, []).append(candidate)
        with ThreadPoolExecutor(processes) as pool:
            try:
                list(pool.map(self._prepare, of_variant.values()))
            except KeyboardInterrupt:
                self.stopped = INTERRUPTED
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()  # so that no thread waits for a build

    def _prepare(self, candidates: Sequence[Candidate]) -> None:
        declaration = candidates[0].declaration
        cell = self._cells[declaration.ref]
        self._builds[declaration.ref] = []
        try:
            if declaration.compiles:
                arch = arch_named(cell.arch()).target
                found = cell.builds(declaration.path, declaration.name, arch)
                self._builds[declaration.ref] = list(map(str, found.data.get("builds", ())))
            small = dict.fromkeys(map(_small, candidates))
            for candidate in small:
                if self.stopped:
                    return
                cell.time(declaration.path, _request(candidate, Rules(calls=1, row_seconds=0)))
        except (InfrastructureError, KeyError):
            return

    def rows(self, candidates: Sequence[Candidate]) -> Iterator[Row]:
        """Time each candidate in turn.  After Ctrl-C, or when the time is over, the rest is left,
        so that what was timed is not lost."""
        begun = time.monotonic()
        for candidate in candidates:
            total = self.rules.total
            if not self.stopped and total is not None and time.monotonic() - begun > total:
                self.stopped = f"the {total:g} s for all rows were over"
            if not self.stopped:
                try:
                    yield self._timed(candidate, self.rules)
                    continue
                except KeyboardInterrupt:
                    self.stopped = INTERRUPTED
            yield self._row(candidate, "left", self.stopped)

    def trial(self, candidate: Candidate) -> float | None:
        """Seconds of a call, the median of a few; None where it does not work."""
        row = self._timed(candidate, TRIAL)
        return row["seconds"]["median"] if row["outcome"] == "timed" else None

    def _timed(self, candidate: Candidate, rules: Rules) -> Row:
        declaration = candidate.declaration
        cell = self._cells[declaration.ref]
        try:
            reply = cell.time(declaration.path, _request(candidate, rules))
        except InfrastructureError as error:
            reply = Reply("crash", str(error))
        if reply.status == "unsupported":
            return self._row(candidate, "left", f"refuses {reply.argument}: {reply.message}")
        if not reply.ok:
            cell.restart()
            return self._row(candidate, "failed", f"{reply.status}: {_first_line(reply.message)}")
        try:
            return self._of_reply(candidate, reply.data)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            cell.restart()
            return self._row(candidate, "failed", f"breach: it answered nonsense ({error})")

    def _of_reply(self, candidate: Candidate, data: dict[str, Any]) -> Row:
        workload, dtype = candidate.workload, candidate.dtype
        seconds = summary([float(one) for one in data["seconds"]])
        tflops = workload.flops / seconds["median"] / 1e12
        peak = self.peaks.get(dtype)
        self.flushed = int(data["flushed"])
        row = self._row(candidate, "timed", "")
        row |= {
            "calls": len(data["seconds"]),
            "warmups": int(data["warmups"]),
            "seconds": seconds,
            "tflops": tflops,
            "share": None if peak is None else tflops / peak,
            "intensity": workload.intensity(dtype),
            "first": [float(value) for value in data["first"]],
            "last": [float(value) for value in data["last"]],
            "rms": [float(value) for value in data["rms"]],
            "differs": "",
        }
        return row

    def _row(self, candidate: Candidate, outcome: Any, reason: str) -> Row:
        declaration = candidate.declaration
        names = self._builds.get(declaration.ref, [])
        return {
            "variant": declaration.ref,
            "family": declaration.family,
            "source_hash": declaration.source_hash,
            "config": candidate.config.name,
            "build": build_name(names, candidate),
            "dtype": candidate.dtype,
            "workload": shape_of(candidate.workload),
            "outcome": outcome,
            "reason": reason,
        }


def summary(seconds: Sequence[float]) -> Seconds:
    """Raises ValueError for no time, or one that is not above 0."""
    if not seconds or not all(0 < one < math.inf for one in seconds):
        raise ValueError("times must be above 0 s")
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [seconds[0]]
    return {
        "median": median(seconds),
        "minimum": min(seconds),
        "p10": tenths[0],
        "p90": tenths[-1],
    }


def build_name(names: Sequence[str], candidate: Candidate) -> str:
    """The build among `names` that a candidate runs, by the words in its name; "" if none does."""
    dims = candidate.declaration.head_dim_buckets or (candidate.workload.head_dim,)
    bucket = min((dim for dim in dims if dim >= candidate.workload.head_dim), default=max(dims))
    others = {"full", "causal"} - {candidate.workload.mask}
    config = candidate.config.name
    for name in names:
        words = set(re.findall(r"\w+", re.sub(r"\bd (?=\d)", "d", name.removeprefix(config))))
        wanted = {candidate.dtype, f"d{bucket}"}
        if name.startswith(config) and wanted <= words and not words & (others | {"unaligned"}):
            return name
    return ""


def flagged(rows: Sequence[Row]) -> list[Row]:
    """The rows, with `differs` set where values are far from the median over all variants that
    were timed on the same workload.

    Inputs are drawn alike for all dtypes, so that all of them compare; a workload with one row has
    nothing to compare with.
    """
    groups: dict[Workload, list[Row]] = {}
    for row in rows:
        if row["outcome"] == "timed":
            groups.setdefault(workload_of(row["workload"]), []).append(row)
    return [
        {**row, "differs": _differs(row, groups[workload_of(row["workload"])])}
        if row["outcome"] == "timed"
        else row
        for row in rows
    ]


def _differs(row: Row, group: Sequence[Row]) -> str:
    # Those of the row, or of what most others have where it is coarser.
    roundoffs = [2.0 ** -dtype_named(one["dtype"]).precision for one in (row, *group)]
    roundoff = max(roundoffs[0], median_high(roundoffs[1:]))
    steps = [_step(one) for one in (row, *group)]
    step = max(steps[0], median_high(steps[1:]))
    for at, (which, mine) in enumerate((("first", row["first"]), ("last", row["last"]))):
        rms = _middle([one["rms"][at] for one in group])
        shared = min(len(one[("first", "last")[at]]) for one in group)
        for column, value in enumerate(mine[:shared]):
            common = _middle([(one["first"], one["last"])[at][column] for one in group])
            if not abs(value - common) <= _APART * max(roundoff * rms, step / 2):
                return f"{which} row, column {column}: {value:.6g}, others {common:.6g}"
    return ""


def _step(row: Row) -> float:
    """The smallest number above zero of the result's format."""
    problem = workload_of(row["workload"]).problem(row["dtype"])
    return dtype_named(problem.dtype_out).smallest_subnormal


def _middle(values: Sequence[float]) -> float:
    """The median of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _small(candidate: Candidate) -> Candidate:
    """What compiles the same build, and takes no time."""
    workload = replace(candidate.workload, batch=1, heads=_WARM_HEADS, seqlen=_WARM_SEQLEN)
    problem = workload.problem_for(candidate.declaration, candidate.dtype)
    if isinstance(problem, str):
        return candidate
    return replace(candidate, workload=workload, problem=problem)


def _request(candidate: Candidate, rules: Rules) -> dict[str, Any]:
    declaration, workload, problem = (
        candidate.declaration,
        candidate.workload,
        candidate.problem,
    )
    lse = workload.direction == "backward" or declaration.contract.lse is not None
    where = plan(problem, lse=lse, workspace={}, entry=workload.direction)
    return {
        "variant": declaration.name,
        "entry": workload.direction,
        "config": candidate.config.name,
        "slots": where.as_data(),
        "stored": where.stored_as_data(),
        "size": where.size,
        "mask": problem.mask.name,
        "softmax_scale": problem.scale,
        "score_mod": "",
        "descaling": problem.descaling,
        "timing": {
            "seed": _SEED,
            "calls": rules.calls,
            "warmups": rules.warmups,
            "least": min(LEAST, rules.calls),
            "seconds": rules.row_seconds,
        },
    }


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]
