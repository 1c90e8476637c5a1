"""`python -m tests.mutants [--seconds S] [--write] [ID...]`: hunt the mutants that are not on
record, or these again, and write record.json and docs/mutation.md.

It can be stopped at any time and goes on where it was.  --write: hunt none.
"""

from __future__ import annotations

import argparse
import time

from tests.faults.stand import Stand
from tests.mutants import record
from tests.mutants.hunt import Hunt
from tests.mutants.mutant import Mutant, chosen


def main() -> None:
    """Hunt, record, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th of them, from the i-th on")
    given = parser.parse_args()
    mutants = chosen()
    entries = record.current(mutants, record.load())
    number, of = map(int, given.shard.split("/"))
    left = [
        mutant
        for mutant in mutants[number::of]
        if (mutant.id in given.ids if given.ids else mutant.id not in entries)
    ]
    if not given.write:
        _hunt(left, time.monotonic() + given.seconds)
        entries = record.current(mutants, record.load())
    record.DOCUMENT.write_text(record.document(mutants, entries), encoding="utf-8")


def _hunt(left: list[Mutant], end: float) -> None:
    with Stand() as stand:
        hunt = Hunt(stand)
        for mutant in left:
            if time.monotonic() > end:
                break
            found = hunt(mutant)
            by = "" if found.by is None else found.by.id
            entry = record.Entry(found.how, by, found.asked, round(found.seconds, 2))
            record.save(record.load() | {mutant.id: entry})
            print(
                f"{mutant.id} line {mutant.mutation.line}: {mutant.before!r} -> {mutant.after!r}:"
                f" {found.how} {by} ({found.asked} asked, {found.seconds:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
