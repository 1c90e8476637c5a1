"""`python3 -m tests.honest_sweep JOURNAL`: so many honest elements of each tensor and declaration.

Every emulated forward and backward of the harness is judged by its bound and, where more is known,
by the interval before its last rounding, on inputs that climb towards these limits;
`tests.harness.honest_climbs` says how, and which elements count.  The declaration with the fewest
elements comes next, until each tensor of each has as many as asked for, or the time is over.
JOURNAL gets a line for each climb, so that a sweep goes on where it stopped; with `--show` its
counts are printed and nothing runs.  It ends with 1 if an element was refused.

Processes share a sweep, each with a `--share` and a journal of its own; one file with the lines of
all journals is the journal of the whole.  A GPU (`--device cuda`) takes more heads at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.harness.honest_climbs import Climbed, Declared, climb, declared
from verify.tolerance import MODEL

ELEMENTS = 1_000_000
COUNTING = "exact values"  # what counts as an element: journals that say otherwise are not read
_BATCH = {"cpu": 1, "cuda": 4}


class Journal:
    """The climbs so far: a file with a line of JSON for each, and their totals by declaration, of
    today's model of the bounds and today's way to count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.totals: dict[str, Climbed] = {}
        self.turns: Counter[str] = Counter()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            if line["model"] == MODEL and line.get("counting") == COUNTING:
                self._count(line)

    def add(self, name: str, found: Climbed, device: str, seconds: float) -> None:
        """One more climb, made on that device in so many seconds of a core."""
        line = {"model": MODEL, "counting": COUNTING, "declared": name, **asdict(found)}
        line |= {"turn": self.turns[name], "device": device}
        line["seconds"] = round(seconds, 3)
        self._count(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _count(self, line: dict[str, Any]) -> None:
        self.turns[line["declared"]] += 1
        total = self.totals.setdefault(line["declared"], Climbed())
        for tensor, worst in line["worst"].items():
            total.counted[tensor] = total.counted.get(tensor, 0) + line["counted"][tensor]
            total.refused[tensor] = total.refused.get(tensor, 0) + line["refused"][tensor]
            total.worst[tensor] = max(worst, total.worst.get(tensor, 0.0))


def shown(chosen: dict[str, Declared], totals: dict[str, Climbed], asked: int) -> Iterator[str]:
    """A line for each declaration, one for each tensor, and what all of them have."""
    sums: dict[str, list[int]] = {}
    parts: dict[str, float] = {}
    for name, one in sorted(chosen.items()):
        total = totals.get(name, Climbed())
        for tensor in one.tensors:
            count = total.counted.get(tensor, 0)
            own = (1, int(count >= asked), count, total.refused.get(tensor, 0))
            before = sums.get(tensor, [0] * len(own))
            sums[tensor] = [x + y for x, y in zip(before, own, strict=True)]
            parts[tensor] = max(parts.get(tensor, 0.0), total.worst.get(tensor, 0.0))
        cells = (f"{t} {total.counted[t]:,} ({w:.4f})" for t, w in total.worst.items())
        yield f"{name}: {', '.join(cells) or 'none'}; {sum(total.refused.values())} refused"
    for tensor, (pairs, enough, count, refused) in sums.items():
        yield (
            f"{tensor}: {count:,} elements of {pairs} declarations, {enough} with {asked:,};"
            f" {refused} refused; largest part of a limit {parts[tensor]:.6f}"
        )
    pairs, enough, every, refused = (sum(one[n] for one in sums.values()) for n in range(4))
    largest = max(parts.values(), default=0.0)
    yield (
        f"{every:,} elements, {refused} refused; {enough} of {pairs} pairs of a tensor and a"
        f" declaration have {asked:,}; largest part of a limit {largest:.6f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Climb until there are enough elements, or the time is over; 1 if one was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of each tensor")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time it has")
    parser.add_argument("--only", default="", help="a part of the name of the declarations")
    parser.add_argument("--share", default="0/1", help="every N-th declaration from I on, I/N")
    parser.add_argument("--device", choices=tuple(_BATCH), default="cpu", help="where it computes")
    parser.add_argument("--show", action="store_true", help="print the counts and run nothing")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    torch.set_num_threads(1)
    journal, end = Journal(asked.journal), time.monotonic() + asked.seconds
    first, step = map(int, asked.share.split("/"))
    named = {name: one for name, one in declared().items() if asked.only in name}
    chosen = dict(list(named.items())[first::step])

    def least(name: str) -> int:
        return min(journal.totals.get(name, Climbed()).counted.values(), default=0)

    while not asked.show and time.monotonic() < end:
        name = min(chosen, key=least)
        if least(name) >= asked.elements:
            break
        turn, begun = journal.turns[name], time.process_time()
        found = climb(chosen[name], turn, _BATCH[asked.device], asked.device)
        journal.add(name, found, asked.device, time.process_time() - begun)
        if any(found.refused.values()):
            print(f"REFUSED {found.refused} in climb {turn} of {name}", flush=True)
    print(*shown(chosen, journal.totals, asked.elements), sep="\n")
    return int(
        any(sum(journal.totals[name].refused.values()) for name in chosen if name in journal.totals)
    )


if __name__ == "__main__":
    sys.exit(main())
