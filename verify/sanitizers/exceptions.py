"""The declared exceptions: records that are known to be false.

`WAIVERS` is the only list.  It stays empty until a record has been proved false.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from verify.sanitizers.records import Record


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A record that is known to be false.

    Matching records of that tool and kind do not count, if the tool has that version.  A waiver
    that matches nothing in a complete run is dead, and the run fails: so does one for another
    version of the tool.

    kind: of the record, such as "Analysis".  kernel, words, source: regular expressions that are
    searched in the record's kernel, in all its words, and in the text of its source line (which,
    unlike its number, stays as it is when lines are added above it).  evidence: how it was shown
    that the tool is wrong.  version: the tool's, such as "2025.3.1.0".
    """

    tool: str
    kind: str
    kernel: str
    source: str
    reason: str
    evidence: str
    version: str
    words: str = ""

    def covers(self, record: Record) -> bool:
        """Whether the waiver matches the record; never if the record has unknown elements."""
        return (
            (self.tool, self.kind) == (record.tool, record.kind)
            and not record.unknown
            and re.search(self.kernel, record.kernel) is not None
            and re.search(self.words, record.words) is not None
            and re.search(self.source, expression(record.source)) is not None
        )


def expression(place: str) -> str:
    """The text of a source line, "file:line"; "" if it cannot be read."""
    path, _, number = place.rpartition(":")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return lines[int(number) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


WAIVERS: tuple[Waiver, ...] = ()
