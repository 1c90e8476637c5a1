"""Large evidence, read by several processes: each parses some of the files.

A line of a case takes about 20 us to parse and to put into a table, so a million take 20 s of one
core.  A process of its own costs 0.15 s; what it read comes back pickled, at about a tenth of the
time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from verify.bundle import PACKAGE
from verify.evidence.lines import read_file
from verify.evidence.records import EvidenceError
from verify.evidence.run_records import RunRecords
from verify.machine.cores import cores

_LARGE = 32 << 20  # bytes: they take about 0.4 s
_LOST = (EOFError, OSError, pickle.UnpicklingError)  # a process that did not come to its end


def read_files(names: Mapping[Path, str], shared: dict[Any, Any]) -> Iterator[RunRecords]:
    """What each of a directory's files holds, in their order.

    names: what messages call each file.  shared: `Packer`'s.  Raises EvidenceError as `read_file`.
    """
    sizes = {file: file.stat().st_size for file in names}
    processes = min(cores(), len(names))
    if processes < 2 or sum(sizes.values()) < _LARGE:
        for file, name in names.items():
            yield read_file(file, name, shared)
        return
    shares = [{file: names[file] for file in share} for share in _shares(sizes, processes)]
    with contextlib.ExitStack() as running:
        streams = [_started(share, running) for share in shares]
        found: dict[Path, RunRecords] = {}
        for share, stream in zip(shares, streams, strict=True):
            found |= _received(share, stream, shared)
    for file in names:
        yield found[file]


def _shares(sizes: Mapping[Path, int], count: int) -> list[list[Path]]:
    """The files in `count` parts, none empty, whose sizes differ little."""
    shares: list[list[Path]] = [[] for _ in range(count)]
    filled = [0] * count
    for file in sorted(sizes, key=sizes.__getitem__, reverse=True):
        least = min(range(count), key=lambda share: (filled[share], len(shares[share])))
        shares[least].append(file)
        filled[least] += sizes[file]
    return shares


def _started(share: Mapping[Path, str], running: contextlib.ExitStack) -> BinaryIO:
    """Where a process writes what it read; nothing is there if the system starts no process."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "verify.evidence.apart"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return BytesIO()
    running.enter_context(process)
    running.callback(process.kill)  # before the wait for its end
    asked, told = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
    with contextlib.suppress(OSError), asked:
        pickle.dump(dict(share), asked)
    return told


def _received(
    share: Mapping[Path, str], stream: BinaryIO, shared: dict[Any, Any]
) -> dict[Path, RunRecords]:
    """What a process read; where none comes, this process reads."""
    found = {}
    for file, name in share.items():
        try:
            records = pickle.load(stream)
        except _LOST:
            records = read_file(file, name, shared)
        if isinstance(records, EvidenceError):
            raise records
        for table in records.tables:
            table.share(shared)
        found[file] = records
    return found


def main() -> None:
    """Read the files that standard input names, and write their records to standard output."""
    shared: dict[Any, Any] = {}
    for file, name in pickle.load(sys.stdin.buffer).items():
        try:
            found: RunRecords | EvidenceError = read_file(file, name, shared)
        except EvidenceError as error:
            found = error
        pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
