"""The journal of a campaign: an append-only file of events, one JSON object a line.

What the evidence store promises holds here, too: one write a line, a torn line is no event, and
power loss is not covered.  Evidence is written before the event that says that its lease is done;
so a coordinator that is killed between the two gives the lease again, and the second evidence says
what the first one does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from verify.campaign.leases.events import Event

NAME = "journal.jsonl"
_READER = msgspec.json.Decoder(Event)


class JournalError(Exception):
    """A journal holds a whole line that is no event; the message names it."""


class Journal:
    """Appends events; opening an existing journal continues it.  Raises OSError if the disk
    refuses."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / NAME
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a predecessor died in the middle of a line

    def append(self, event: Event) -> None:
        """Append one event."""
        data = msgspec.json.encode(event) + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            os.write(self._fd, b"\n")
            raise OSError(f"{self.path}: {written} of {len(data)} bytes written; is the disk full?")

    def close(self) -> None:
        os.close(self._fd)


def read(directory: Path) -> Iterator[Event]:
    """The events of a directory's journal, in order; none if there is no journal.

    Raises JournalError.
    """
    path = directory / NAME
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _READER.decode(line)
            except msgspec.ValidationError as error:
                raise JournalError(f"{path}:{number}: {error}") from None
            except msgspec.DecodeError:
                continue  # torn
