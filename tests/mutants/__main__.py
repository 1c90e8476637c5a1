"""`python -m tests.mutants [--cuda | --cute] [--seconds S] [--write] [ID...]`: hunt the mutants
that are not on record, or these again, and write the record and docs/mutation.md.

It can be stopped at any time and goes on where it was.  --cuda: those of the raw-PTX kernels,
--cute: of the CuTe forward, not those of the Triton kernels.  --write: hunt none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from tests.faults.stand import Stand
from tests.harness.host_compiler import COMPILER, MISSING
from tests.mutants import document, record, scores
from tests.mutants.cuda.host_hunt import HostHunt
from tests.mutants.cuda.hunt import CudaHunt
from tests.mutants.cuda.mutant import CudaMutant
from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.cute.hunt import CuteHunt
from tests.mutants.cute.mutant import chosen as cute_chosen
from tests.mutants.mutant import Mutant
from tests.mutants.record import Entry, Ledger
from tests.mutants.triton.hunt import TritonHunt
from tests.mutants.triton.mutant import TritonMutant, chosen
from tests.mutants.truths import remembered

M = TypeVar("M", bound=Mutant)
_TOGETHER = 4  # mutants of a ground that are hunted one after the other


def main() -> None:
    """Hunt, record, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("ids", nargs="*")
    languages = parser.add_mutually_exclusive_group()
    languages.add_argument("--cuda", action="store_true")
    languages.add_argument("--cute", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    if given.write:
        pass
    elif given.cuda:
        if COMPILER is None:
            parser.exit(3, f"{MISSING}\n")
        _hunt_host(CudaHunt(), cuda_chosen(), record.CUDA, given.ids, end)
    elif given.cute:
        _hunt_host(CuteHunt(), cute_chosen(), record.CUTE, given.ids, end)
    else:
        with Stand() as stand, remembered():
            hunt = TritonHunt(stand)
            left = _left(chosen(), record.TRITON, given.ids)
            _teach(hunt, {mutant.variant for mutant in left})
            _hunt(_by_kernel(left), record.TRITON, hunt, end)
    write()


def _hunt_host(
    opening: HostHunt, mutants: list[CudaMutant], ledger: Ledger, ids: list[str], end: float
) -> None:
    with opening as hunt:
        hunt.learn(mutants, ledger.current(mutants))
        _hunt(_left(mutants, ledger, ids), ledger, hunt, end)


def write() -> None:
    """Write the document and the scores, and drop the entries of mutants that are no longer
    there."""
    parts = document.parts(chosen(), cuda_chosen(), cute_chosen())
    for part in parts:
        part.ledger.save(part.ledger.current(part.mutants))
    document.PATH.write_text(document.document(parts), encoding="utf-8")
    scores.PATH.write_text(scores.module(scores.sources()), encoding="utf-8")


def _left(mutants: list[M], ledger: Ledger, ids: list[str]) -> list[M]:
    entries = ledger.current(mutants)
    return [m for m in mutants if (m.id in ids if ids else m.id not in entries)]


def _hunt(left: Iterable[M], ledger: Ledger, hunt: Callable[[M], Entry], end: float) -> None:
    """Hunt them until that time, and print each outcome and the rate."""
    begun = time.monotonic()
    killed = 0
    for mutant in left:
        if time.monotonic() > end:
            break
        found = hunt(mutant)
        found = replace(found, seconds=round(found.seconds, 2))
        ledger.save(ledger.load() | {mutant.id: found})
        print(
            f"{mutant.id} line {mutant.mutation.line}: {mutant.before!r} -> {mutant.after!r}:"
            f" {found.how} {found.by} ({found.asked} asked, {found.seconds:.1f} s)",
            flush=True,
        )
        killed += found.how == record.KILLED
    minutes = (time.monotonic() - begun) / 60
    print(f"{killed} convicted in {minutes:.1f} minutes: {killed / minutes:.1f} a minute")


def _teach(hunt: TritonHunt, variants: set[str]) -> None:
    """What convicted the mutants of these variants on record is asked first."""
    entries = record.TRITON.load()
    for mutant in chosen():
        catch = entries[mutant.id].catch if mutant.id in entries else None
        if catch is not None and mutant.variant in variants:
            hunt.learn(mutant, catch)


def _by_kernel(left: list[TritonMutant]) -> list[TritonMutant]:
    """The mutants of a kernel together, a few at a time: what one has made the next need not
    compute, and each kernel gets its share of a short hunt."""
    size = _TOGETHER * len({mutant.ground for mutant in left})
    return [
        mutant
        for start in range(0, len(left), max(size, 1))
        for mutant in sorted(left[start : start + size], key=lambda mutant: mutant.ground.file)
    ]


if __name__ == "__main__":
    main()
