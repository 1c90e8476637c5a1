"""What compute-sanitizer writes: error records as XML, and a summary line.  No schema is published,
so reading is strict.

A document that is not made of `record` elements with a `kind`, or a log without exactly one
summary, is not understood; what is not understood never counts as clean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from xml.etree import ElementTree

_ROOT = "ComputeSanitizerOutput"
_SESSION = {"session"}  # what --save-session-details would add beside the records
_STACKS = ("hostStack", "deviceStack", "hostAccessStack", "hostMemOpStack")
# Every element that 2025.3.1 writes inside a record of a kernel or of an allocation.
_KNOWN = {
    *_STACKS,
    *re.findall(
        r"\w+",
        """
        kind level who threadIdx blockIdx x y z ctaRank pid gridid what text space size
        direction error address accessAddress accessSize errorAddress exception message
        result where func path line pc module frame saveLocation api common current
        write access thread0 thread1 isCudaBarrierOp source destination count type name
        allocation block unused activeMask deadlock barrier muticastFlag muticastMask
        """,
    ),
}
_ERRORS = re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?\s*$", re.MULTILINE)
_SUMMARIES = {
    "memcheck": _ERRORS,
    "initcheck": _ERRORS,
    "synccheck": _ERRORS,
    "racecheck": re.compile(
        r"RACECHECK SUMMARY: (?P<shown>\d+) hazards? displayed \((?P<errors>\d+) errors?,"
        r" (?P<warnings>\d+) warnings?\)\s*$",
        re.MULTILINE,
    ),
}
# What only the log says of an access: the allocation beside it.
_NEAREST = re.compile(
    r"Access (?:to|at) (?P<address>0x[0-9a-f]+) is [^\n]*\n=*\s*(?:and is )?"
    r"(?P<nearest>[^\n]* the nearest allocation at 0x[0-9a-f]+ of size [\d,]+ bytes)"
)
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
    "Error in printing record",
    "Couldn't make XML from record",
)


class NotUnderstood(ValueError):  # noqa: N818 - a fact about a document
    """What the tool wrote does not read; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One error record.  level: "Error", "Warning"...; thread and block: "(x, y, z)"; what it does
    not say is empty.

    nearest: the allocation beside an address that is in none, in the tool's words.  against: the
    places of a race's other accesses, like `source`, "" for one that has none.  words: everything
    that it says, stacks included.  unknown: elements that this reader does not know.
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
    nearest: str = ""
    against: tuple[str, ...] = ()
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
            "address ": f"{self.address} ({self.nearest})" if self.nearest else self.address,
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


def read_records(text: str, tool: str, log: str = "") -> tuple[Record, ...]:
    """The records of an XML document; the log tells the allocations beside their addresses.

    Raises NotUnderstood.
    """
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
    near = {match["address"]: match["nearest"] for match in _NEAREST.finditer(log)}
    records = (_record(element, tool) for element in root.iter("record"))
    return tuple(replace(record, nearest=near.get(record.address, "")) for record in records)


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
    text = found.get("text", "") or found.get("exception", "")
    if kind == "Synccheck":  # its text says "Barrier error", and its type which one
        text = f"{text}: {found.get('type', '')}"
    others = list(element.iter("destination"))
    if others:
        text = f"{text}: {_access(element)} against {' and '.join(map(_access, others))}"
    return Record(
        tool=tool,
        kind=kind,
        level=_text(element, "level") or "Error",  # most kinds have no other
        text=" ".join(text.split()),
        kernel=found.get("func", "") or _kernel_in(text),
        source=_place(path, line),
        thread=_axes(own, "threadIdx"),
        block=_axes(own, "blockIdx"),
        address=_hex(found.get("address") or found.get("accessAddress") or ""),
        size=found.get("size") or found.get("accessSize") or "",
        against=tuple(_place(_text(each, ".//path"), _text(each, ".//line")) for each in others),
        words=" ".join(" ".join(element.itertext()).split()),
        unknown=tuple(sorted({child.tag for child in element.iter()} - _KNOWN - {"record"})),
    )


def _access(vertex: ElementTree.Element) -> str:
    """An access of a race: its direction and place; that of a record is the source's."""
    names = ("direction", "path", "line")
    direction, path, line = (_text(vertex, f".//{name}") or "?" for name in names)
    return f"{direction} at {path}:{line}"


def _place(path: str, line: str) -> str:
    return f"{path}:{line}" if path else ""


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
