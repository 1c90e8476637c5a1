"""The end of a campaign from outside: which cases it leaves begun and not judged.

A case whose judge died is *lost*: the report says so, since the kernel or the judge can be the
cause.  A case that was under way when the user ended the run, or when its time was over, is
*interrupted*.  The two are told apart by the judge's process: it lives when the run is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from verify.evidence import ENDED, Interruption, Reason, Recorder, being_written
from verify.evidence.records import OF_VERDICTS

MARKER = ENDED  # while that file is there, no process begins another case
WORKER = "interruptions"  # under this name the records are written
_BLOCK = 1 << 16  # bytes
_ENDED = 2.0  # seconds in which processes that were killed are gone


def under_way(directory: Path) -> list[Path]:
    """The evidence files of a run whose writers live."""
    return [path for path in sorted(directory.glob("*.jsonl")) if being_written(path)]


def record(directory: Path, files: Iterable[Path], reason: Reason) -> int:
    """Record the cases that the writers of these files had begun last and have not judged, when
    these processes have ended; returns how many."""
    files = list(files)
    until = time.monotonic() + _ENDED
    while any(map(being_written, files)) and time.monotonic() < until:
        time.sleep(0.01)
    cases = {case: variant for path in files for case, variant in _begun(path)}
    if not cases:
        return 0
    with Recorder(directory, WORKER) as recorder:
        for case, variant in sorted(cases.items()):
            recorder.write(Interruption(case=case, variant=variant, reason=reason))
    return len(cases)


def _begun(path: Path) -> Iterator[tuple[str, str]]:
    """The cases, with their variants, that the file's writer has begun together and not judged:
    its last ones, since an error of the judge in an earlier case is no interruption."""
    last: dict[str, str] = {}
    for line in _last_lines(path):
        data = _parsed(line)
        if data.get("kind") == "begin":
            last = {} if not data.get("ahead") else last
            last[str(data.get("case"))] = str(data.get("variant", ""))
        elif data.get("kind") in OF_VERDICTS:
            last.pop(str(data.get("case")), None)
    yield from last.items()


def _last_lines(path: Path) -> list[bytes]:
    """The lines from a begin on that was not made ahead of others; all lines if there is none."""
    size = path.stat().st_size
    read = _BLOCK
    with path.open("rb") as file:
        while True:
            file.seek(max(0, size - read))
            lines = file.read().splitlines()
            if read >= size:
                return lines
            for number, line in enumerate(lines[1:], 1):  # the first one can be cut
                data = _parsed(line)
                if data.get("kind") == "begin" and not data.get("ahead"):
                    return lines[number:]
            read *= 4


def _parsed(line: bytes) -> dict[str, object]:
    """A record as data; {} for a line that a kill cut short."""
    with contextlib.suppress(ValueError):
        data = json.loads(line)
        if isinstance(data, dict):
            return data
    return {}


def forget(directory: Path) -> None:
    """Remove the marker of an earlier interruption: the run goes on."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / MARKER)
