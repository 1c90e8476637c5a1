"""`python -m tests.mutants [--cuda | --cute] [--processes N] [--seconds S] [--write] [ID...]`: hunt
the mutants that are not on record, or these again, and write the record and docs/mutation.md.

It can be stopped at any time, also by SIGINT or SIGTERM, and goes on where it was: what has become
of a mutant is on record at once.  --cuda: those of the raw-PTX kernels, --cute: of the CuTe
forward, not those of the Triton kernels.  --processes: that share the hunt; default: 1.  --seconds:
then it stops; mutants that are under way are left.  --write: hunt none.
"""

from __future__ import annotations

import argparse
import time

from tests.harness.host_compiler import COMPILER, MISSING
from tests.mutants import document, scores
from tests.mutants.crew import Crew
from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.cute.mutant import chosen as cute_chosen
from tests.mutants.languages import LANGUAGES, Language
from tests.mutants.mutant import Mutant
from tests.mutants.triton.mutant import chosen


def main() -> None:
    """Hunt, record, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("ids", nargs="*")
    languages = parser.add_mutually_exclusive_group()
    for name in ("cuda", "cute"):
        languages.add_argument(f"--{name}", dest="name", action="store_const", const=name)
    parser.set_defaults(name="triton")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    if not given.write:
        language = LANGUAGES[given.name]
        if given.name != "triton" and COMPILER is None:
            parser.exit(3, f"{MISSING}\n")
        Crew(language, _left(language, given.ids), max(1, given.processes), end).hunt()
    write()


def write() -> None:
    """Write the document and the scores, and drop the entries of mutants that are no longer
    there."""
    parts = document.parts(chosen(), cuda_chosen(), cute_chosen())
    for part in parts:
        entries = part.ledger.current(part.mutants)
        if entries != part.ledger.load():  # another hunt may be writing its record
            part.ledger.save(entries)
    document.PATH.write_text(document.document(parts), encoding="utf-8")
    scores.PATH.write_text(scores.module(scores.sources()), encoding="utf-8")


def _left(language: Language, ids: list[str]) -> list[Mutant]:
    mutants = language.chosen()
    entries = language.ledger.current(mutants)
    return [m for m in mutants if (m.id in ids if ids else m.id not in entries)]


if __name__ == "__main__":
    main()
