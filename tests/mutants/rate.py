"""`python -m tests.mutants.rate SECONDS`: how many mutants a minute this machine convicts.

Prints a line of JSON for each language, a `verify.timing.mutants.MutantRate`.  The sample is what
the records hold: of each mutated file the first two convicted mutants, in the order in which they
are chosen.  Each is planted, compiled where it has to be, and asked the question that convicted it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tests.mutants.mutant import Mutant
from tests.mutants.record import CUDA, KILLED, TRITON, Ledger
from verify.timing.mutants import MutantRate

M = TypeVar("M", bound=Mutant)
_OF_A_FILE = 2


def sample(mutants: Iterable[M], ledger: Ledger) -> list[M]:
    """Those that are judged, in a fixed order."""
    entries = ledger.load()
    counts: Counter[str] = Counter()
    found = []
    for mutant in mutants:
        if mutant.id in entries and entries[mutant.id].how == KILLED:
            counts[mutant.edited] += 1
            if counts[mutant.edited] <= _OF_A_FILE:
                found.append(mutant)
    return found


def rate(
    language: str, chosen: list[M], convicted: Callable[[M], bool], limit: float
) -> MutantRate:
    """Judge one after the other for so many seconds at most; one that has begun is judged."""
    begun = time.monotonic()
    results: list[bool] = []
    for mutant in chosen:
        if time.monotonic() - begun > limit:
            break
        results.append(convicted(mutant))
    return {
        "language": language,
        "sample": len(chosen),
        "judged": len(results),
        "convicted": sum(results),
        "seconds": round(time.monotonic() - begun, 1),
        "reason": "",
    }


def rates(seconds: float) -> Iterator[MutantRate]:
    """Of each language, half of the time each."""
    if importlib.util.find_spec("triton") is None:
        yield _none("Triton", "triton is not installed")
    else:
        yield _triton(seconds / 2)
    from tests.harness.host_compiler import COMPILER, MISSING

    if COMPILER is None:
        yield _none("CUDA", MISSING)
    else:
        yield _cuda(seconds / 2)


def _none(language: str, reason: str) -> MutantRate:
    return {
        "language": language,
        "sample": 0,
        "judged": 0,
        "convicted": 0,
        "seconds": 0.0,
        "reason": reason,
    }


def _triton(seconds: float) -> MutantRate:
    from tests.faults.search import Catch
    from tests.faults.stand import Stand
    from tests.mutants.triton.hunt import TritonHunt
    from tests.mutants.triton.mutant import chosen

    entries = TRITON.load()
    with Stand() as stand:
        hunt = TritonHunt(stand)
        return rate(
            "Triton",
            sample(chosen(), TRITON),
            lambda mutant: hunt.again(mutant, Catch.parse(entries[mutant.id].by)),
            seconds,
        )


def _cuda(seconds: float) -> MutantRate:
    from tests.mutants.cuda.hunt import CudaHunt
    from tests.mutants.cuda.mutant import chosen

    entries = CUDA.load()
    with CudaHunt() as hunt:
        return rate(
            "CUDA",
            sample(chosen(), CUDA),
            lambda mutant: hunt.again(mutant, entries[mutant.id]),
            seconds,
        )


if __name__ == "__main__":
    for one in rates(float(sys.argv[1])):
        print(json.dumps(one), flush=True)
