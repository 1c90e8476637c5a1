"""The declared exceptions: records that are known to be false, and kernels that a tool does not
take.

`WAIVERS` is the only list of the former.  It stays empty until a record has been proved false.
`LIMITS` is that of the latter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from verify.sanitizers.records import Record
from verify.sanitizers.tool import CONSAN


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


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a tool of a version is known not to take: a kernel that it fails to build.

    Such a kernel is *not run* under the tool, with the reason, and the run can be clean.  words:
    regular expression that is searched in what the process printed.  version: the first numbers of
    the tool's; a later version has to show the limit again to be excused.
    """

    tool: str
    words: str
    version: str
    reason: str
    evidence: str

    def covers(self, tool: str, version: str, output: str) -> bool:
        """Whether the limit explains why that tool of that version proved nothing."""
        same = tool == self.tool and f"{version}.".startswith(f"{self.version}.")
        return same and re.search(self.words, output) is not None


LIMITS: tuple[Limit, ...] = tuple(
    Limit(
        tool=CONSAN,
        words="error: Operation accessing memory unaccounted for in buffer region analysis",
        version=version,
        reason=f"ConSan of Triton {version} does not build it",
        evidence="flash_forward.py, block_pointer_forward.py and descriptor_forward.py for sm_90a,"
        f" built without a GPU by {tried}: it does not know the operand of a `tl.dot` in a loop",
    )
    for version, tried in (("3.7", "3.7.1"), ("3.8", "3.8.0"))
)
