"""What compute-sanitizer writes: error records as XML, and a summary line.  No schema is published,
so reading is strict.

A document that is not made of `record` elements with a `kind`, or a log without exactly one
summary, is not understood; what is not understood never counts as clean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

_ROOT = "ComputeSanitizerOutput"
_SESSION = {"session"}  # what --save-session-details would add beside the records
_STACKS = ("hostStack", "deviceStack", "hostAccessStack", "hostMemOpStack")
# Every element that the program of 2025.3.1 can write inside a record of memcheck or racecheck.
_KNOWN = {
    *("kind", "level", "who", "threadIdx", "blockIdx", "x", "y", "z", "ctaRank", "pid", "gridid"),
    *(
        "what",
        "text",
        "space",
        "size",
        "direction",
        "error",
        "address",
        "accessAddress",
        "accessSize",
        "errorAddress",
    ),
    *("where", "func", "path", "line", "pc", "module", "frame", "saveLocation", *_STACKS),
    *(
        "allocation",
        "api",
        "current",
        "write",
        "read",
        "isCudaBarrierOp",
        "thread0",
        "thread1",
        "type",
        "name",
        "value",
    ),
    *(
        "barrier",
        "activeMask",
        "deadlock",
        "destination",
        "array",
        "deviceheap",
        "unused",
        "offset",
    ),
}
_SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?\s*$", re.MULTILINE),
    "racecheck": re.compile(
        r"RACECHECK SUMMARY: (?P<shown>\d+) hazards? displayed \((?P<errors>\d+) errors?,"
        r" (?P<warnings>\d+) warnings?\)\s*$",
        re.MULTILINE,
    ),
}
# Lines of the log after which its summary proves nothing.
_COMPLAINTS = (
    "Internal Sanitizer",
    "Internal error",
    "Errors might go undetected",
    "Target application terminated before first instrumented",
    "Target application returned an error",
    "No attachable process found",
    "timed-out",
    "didn't terminate successfully",
    "couldn't find exit code",
    "Failed to write XML",
    "Options not supported",
    "options are not supported",
    "Unknown record type",
    "Inconsistent record",
)


class NotUnderstood(ValueError):  # noqa: N818 - a fact about a document
    """What the tool wrote does not read; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One error record.  level: "Error", "Warning"...; thread and block: "(x, y, z)"; what it does
    not say is empty.

    words: everything that it says, stacks included.  unknown: elements that this reader does not
    know.
    """

    tool: str
    kind: str
    level: str = ""
    text: str = ""
    kernel: str = ""
    source: str = ""  # file:line, where the kernel was compiled with line information
    thread: str = ""
    block: str = ""
    address: str = ""
    size: str = ""
    words: str = field(default="", repr=False)
    unknown: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """In words, where: what is known of kernel, line, thread, block and address."""
        parts = {
            "": self.kernel,
            "at ": self.source,
            "thread ": self.thread,
            "block ": self.block,
            "address ": self.address,
        }
        return ", ".join(f"{word}{value}" for word, value in parts.items() if value)


@dataclass(frozen=True)
class Summary:
    """The tool's own count."""

    errors: int
    warnings: int = 0

    @property
    def total(self) -> int:
        return self.errors + self.warnings


def read_records(text: str, tool: str) -> tuple[Record, ...]:
    """The records of an XML document.  Raises NotUnderstood."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise NotUnderstood("the XML declares a document type")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise NotUnderstood(f"the XML does not parse: {error}") from None
    if root.tag != _ROOT:
        raise NotUnderstood(f"the XML's root is {root.tag!r}, not {_ROOT!r}")
    strangers = sorted({child.tag for child in root} - {"record"} - _SESSION)
    if strangers:
        raise NotUnderstood(f"the XML holds {', '.join(strangers)} beside records")
    return tuple(_record(element, tool) for element in root.iter("record"))


def _record(element: ElementTree.Element, tool: str) -> Record:
    kind = _text(element, "kind")
    if not kind:
        raise NotUnderstood("a record has no kind")
    # Frames of host and device stacks have func and line too, and would be taken for the place
    # itself.
    own = [child for part in element for child in ([part] if part.tag in _STACKS else part.iter())]
    found = {
        child.tag: (child.text or "").strip() for child in reversed(own) if child.tag not in _STACKS
    }
    path, line = found.get("path", ""), found.get("line", "")
    text = found.get("text", "")
    return Record(
        tool=tool,
        kind=kind,
        level=_text(element, "level"),
        text=" ".join(text.split()),
        kernel=found.get("func", "") or _kernel_in(text),
        source=f"{path}:{line}" if path else "",
        thread=_axes(own, "threadIdx"),
        block=_axes(own, "blockIdx"),
        address=_hex(found.get("address") or found.get("accessAddress") or ""),
        size=found.get("size") or found.get("accessSize") or "",
        words=" ".join(" ".join(element.itertext()).split()),
        unknown=tuple(sorted({child.tag for child in element.iter()} - _KNOWN - {"record"})),
    )


def _text(element: ElementTree.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _axes(elements: Sequence[ElementTree.Element], name: str) -> str:
    found = next((element for element in elements if element.tag == name), None)
    return "" if found is None else f"({', '.join(_text(found, axis) for axis in 'xyz')})"


def _hex(number: str) -> str:
    return hex(int(number)) if number.isdecimal() else number


def _kernel_in(text: str) -> str:
    """A race's text says `access at kernel(...)+0x120 in file:line`."""
    found = re.search(r"access at (?:0x[0-9a-f]+ in )?([^+\n]+?)(?:\+0x[0-9a-f]+| in |$)", text)
    return found[1].strip() if found else ""


def read_summary(log: str, tool: str) -> Summary:
    """The summary line of a log.  Raises NotUnderstood if there is none, or more than one."""
    found = list(_SUMMARIES[tool].finditer(log))
    if len(found) != 1:
        raise NotUnderstood(f"the log has {len(found) or 'no'} summary lines of {tool}")
    counts = {name: int(value) for name, value in found[0].groupdict().items()}
    if "shown" in counts and counts["shown"] != counts["errors"] + counts["warnings"]:
        raise NotUnderstood(f"the summary does not add up: {found[0][0]}")
    return Summary(counts["errors"], counts.get("warnings", 0))


def complaints(log: str) -> tuple[str, ...]:
    """Lines in which the tool says that it could not do its work."""
    lines = (line.strip("= \t") for line in log.splitlines())
    return tuple(
        line for line in lines if any(phrase.lower() in line.lower() for phrase in _COMPLAINTS)
    )
