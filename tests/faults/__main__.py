"""`python -m tests.faults [NAME...]`: search again, for all faults or these, and write
verdicts.json and docs/sensitivity.md.

About an hour for all of them on two cores.
"""

from __future__ import annotations

import sys
import time

from tests.faults.catalogue import FAULTS
from tests.faults.record import Entry, load, save
from tests.faults.rivals import RIVALS, Gallery
from tests.faults.search import search
from tests.faults.stand import Stand


def main(names: list[str]) -> None:
    """Search, record, and say what was found."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        sys.exit(f"no such fault: {', '.join(sorted(unknown))}")
    entries = load()
    with Stand() as stand:
        gallery = Gallery(stand)
        for fault in FAULTS:
            if names and fault.name not in names:
                continue
            begun = time.monotonic()
            catches = search(stand, fault)
            said = {rival.name: gallery.verdict(rival, fault) for rival in RIVALS}
            entries[fault.name] = Entry(catches, said)
            save(entries)
            oracles = ", ".join(dict.fromkeys(catch.oracle for catch in catches)) or "NOBODY"
            print(
                f"{fault.name}: {oracles} ({time.monotonic() - begun:.0f} s); "
                + ", ".join(said.values()),
                flush=True,
            )
        for line in sorted(gallery.refused):
            print(f"a rule fails a shipped kernel: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
