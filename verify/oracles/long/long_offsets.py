"""Long offsets: O is right, bit for bit, if rows of K or of O are so far apart in memory that
offsets need more than 31 bits.

The problems are small problems of gather. The stride of rows alone puts the last row of one tensor
2^31 elements from the first: 32-bit offsets wrap before that, in elements or in bytes. The expected
result is that of gather, bit for bit. Each variant is judged once, in its narrowest dtype, on a
machine with a GPU and enough free memory. See docs/long-sequences.md.

Premises: those of gather, and rows with a stride (strided_storage).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from references.premises import Premise
from verify.cell.arena import plan
from verify.judging.findings import Ruling
from verify.judging.metamorphic import failed
from verify.judging.trial import Trial
from verify.oracles import Oracle, gather
from verify.problem import Layout, Problem
from verify.problem.storage import STRIDED

REACH = 1 << 31  # elements: 32-bit offsets wrap before, in elements or in bytes
_UNIT = 64  # rows begin at multiples of it, so code paths for aligned rows can be used
_AT_ONCE = 3
_TENSORS = ("k", "out")  # the kernel reads the first and writes the second


def far(problem: Problem, name: str) -> Problem:
    """Return a small problem of `gather` in which the last row of tensor `name` lies beyond REACH,
    due to the stride of rows alone."""
    small = problem.but(seqlen_q=min(problem.seqlen_q, problem.seqlen_kv), distribution="gather")
    heads, rows, dim = small.shapes[name][1:]
    step = (REACH // (heads * (rows - 1)) // _UNIT + 1) * _UNIT
    return small.but(**{f"layout_{name}": Layout("bshd", pitch=max(step - dim, 0))})


def judge(trial: Trial) -> Ruling:
    """Check one problem per tensor, `_AT_ONCE` on a machine; free the memory after each."""
    observed: dict[str, str] = {}
    for name in _TENSORS:
        other = trial.beside(f"far {name}", far(trial.problem, name))
        size = plan(other.problem, lse=True, workspace={}).size
        with _turn(size):
            if not _room(size):
                observed[f"far_{name}"] = "not asked: too little memory is free"
                continue
            try:
                ruling = failed(other) or gather.judge(other)
            finally:
                trial.arena.close()
                trial.cell.restart()  # the process holds a copy on its device
        if ruling.finding is not None:
            message = (
                f"the last row of {name} lies {REACH} elements from the first:"
                f" {ruling.finding.message}"
            )
            return Ruling(
                replace(ruling.finding, oracle="long_offsets", message=message), observed=observed
            )
        observed[f"far_{name}"] = "right"
    return Ruling(observed=observed)


@contextmanager
def _turn(size: int) -> Iterator[None]:
    """Hold one of the machine's turns, of which each later one needs memory for all before it, too:
    their holders may not have taken theirs yet."""
    locks = [
        FileLock(Path(tempfile.gettempdir()) / f"attention-verify-far{number or ''}.lock")
        for number in range(_AT_ONCE)
    ]
    for number, lock in enumerate(locks):
        if number and not _room((number + 1) * size):
            continue
        with suppress(Timeout):
            lock.acquire(timeout=0)
            break
    else:
        lock = locks[0]
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _room(size: int) -> bool:
    """Return whether there is memory for an arena of `size` bytes, which doubles, for its image,
    and for its copy on a device."""
    words = Path("/proc/meminfo").read_text(encoding="ascii").split()
    host = int(words[words.index("MemAvailable:") + 1]) << 10
    return host > 4 * size and (
        not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] > 3 * size
    )


def _concerns(trial: Trial) -> bool:
    """Return whether this is the one problem of the variant, in its narrowest dtype, on a machine
    with a GPU."""
    p, support = trial.problem, trial.declaration.support
    narrowest = min(support.dtypes, key=lambda name: (getattr(torch, name).itemsize, name))
    return (
        p.distribution == "gather"
        and p.seqlen_kv <= 1 << 10
        and p.dtype == narrowest
        and trial.config == trial.declaration.configs[0]
        and support.layouts != "contiguous"
        and STRIDED in support.storages
        and torch.cuda.is_available()
    )


ORACLE = Oracle(
    name="long_offsets",
    group="long",
    catches=(
        "offsets of rows that wrap at 31 bits, in elements or in bytes, in a tensor that is read or"
        " written"
    ),
    judge=judge,
    excludes=gather.excludes,
    needs=gather.NEEDS | {Premise.STRIDED_STORAGE},
    concerns=_concerns,
    rank=40,
)
