"""The declared exceptions: records that are known to be false, and kernels that a tool does not
take.

`WAIVERS` is the only list of the former: a record is there once it has been proved false.  `LIMITS`
is that of the latter.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from verify.sanitizers.records import Record
from verify.sanitizers.tool import CONSAN


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A record that is known to be false.

    Matching records of that tool and kind do not count, if the tool has that version.  A waiver
    that matches nothing in a complete run is dead, and the run fails.  shown_by: the planted twin
    that it covers records of; where that was not tried, it is not dead.

    kind: of the record, such as "Analysis".  kernel, words, source: regular expressions that are
    searched in the record's kernel, in all its words, and in the text of its source line (which,
    unlike its number, stays as it is when lines are added above it).  ends: the source line is that
    of the kernel's `def` in Python, and a race's other accesses are there, too, or at the kernel's
    last statement; so is what a compiler adds to a kernel, and no access of the text.  evidence:
    how it was shown that the tool is wrong.  version: the tool's, such as "2025.3.1.0".
    """

    tool: str
    kind: str
    kernel: str
    source: str
    reason: str
    evidence: str
    version: str
    words: str = ""
    ends: bool = False
    shown_by: str = ""

    def covers(self, record: Record) -> bool:
        """Whether the waiver matches the record; never if the record has unknown elements."""
        return (
            (self.tool, self.kind) == (record.tool, record.kind)
            and not record.unknown
            and re.search(self.kernel, record.kernel) is not None
            and re.search(self.words, record.words) is not None
            and re.search(self.source, expression(record.source)) is not None
            and (not self.ends or at_the_ends(record))
        )


def expression(place: str) -> str:
    """The text of a source line, "file:line"; "" if it cannot be read."""
    path, _, number = place.rpartition(":")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return lines[int(number) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def at_the_ends(record: Record) -> bool:
    """Whether a race is between the `def` of its kernel, a function in Python, and that line or the
    function's last statement."""
    first, last = _ends(record.source.rpartition(":")[0], record.kernel)
    allowed = {first, *last}
    return (
        first != ""
        and record.source == first
        and bool(record.against)
        and allowed.issuperset(record.against)
    )


def _ends(path: str, kernel: str) -> tuple[str, tuple[str, ...]]:
    """The places of the `def` of the only function of that name, and of the lines of its last
    statement; nothing if there is none."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "", ()
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == kernel
    ]
    if len(functions) != 1:
        return "", ()
    (function,) = functions
    last = function.body[-1]
    lines = range(last.lineno, (last.end_lineno or last.lineno) + 1)
    return f"{path}:{function.lineno}", tuple(f"{path}:{line}" for line in lines)


WAIVERS: tuple[Waiver, ...] = (
    Waiver(
        tool="racecheck",
        kind="Analysis",
        kernel="",
        source="^def ",
        ends=True,
        reason="the bytes by which Triton's warp_specialize tells each warp its partition, and the"
        " values that a partition gets: written before a barrier of all warps, read after it",
        evidence="planted-gluon-partitions, whose partitions share nothing else, is accused on an"
        " H100, and so is cuDNN's forward; in the SASS of the twin and of three builds of the"
        " turnstile a BAR.SYNC 1 of all warps is between each write and each read",
        version="2025.3.1.0",
        shown_by="planted-gluon-partitions",
    ),
)


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
