"""Assertions that failed on a device: what ConSan, and a kernel's own `device_assert`, print.

The CUDA runtime prints one line for each thread at which an assertion failed, to the standard error
of the process, and the launch then fails.  Threads of many blocks fail at the same assertion: its
lines are one record, which names the first of the threads and says how many there are.
"""

from __future__ import annotations

import re

from verify.cell.untrusted_text import visible
from verify.sanitizers.records import Record

_LINE = re.compile(
    r"^(?P<path>[^\n]*?):(?P<line>\d+): (?P<kernel>[^\n]+?): block: \[(?P<block>[\d, ]+)\],"
    r" thread: \[(?P<thread>[\d, ]+)\] Assertion `(?P<text>[^\n]*)` failed\.",
    re.MULTILINE,
)
# What an assertion of ConSan says -> the kind of its record.  Any other is the kernel's own.
KINDS = {
    r"outstanding (?:writes|reads)|pending access|proxy|fence": "Race",
    r"deadlock": "Deadlock",
    r"\bbarrier\b|tx-count": "Barrier",
}
OWN = "Assertion"  # the kind of a kernel's own assertion


def kind_of(text: str) -> str:
    """The kind of a failed assertion with that text."""
    kinds = (kind for words, kind in KINDS.items() if re.search(words, text, re.IGNORECASE))
    return next(kinds, OWN)


def read_assertions(output: str, tool: str) -> tuple[Record, ...]:
    """The failed assertions in the output of a process, one record for each place and text."""
    first: dict[tuple[str, ...], re.Match[str]] = {}
    threads: dict[tuple[str, ...], int] = {}
    for match in _LINE.finditer(output):
        key = match["path"], match["line"], match["kernel"], match["text"]
        first.setdefault(key, match)
        threads[key] = threads.get(key, 0) + 1
    return tuple(_record(match, threads[key], tool) for key, match in first.items())


def _record(match: re.Match[str], threads: int, tool: str) -> Record:
    said = {name: visible(value) for name, value in match.groupdict().items()}
    text = " ".join(said["text"].split())
    more = f" ({threads} threads)" if threads > 1 else ""
    return Record(
        tool=tool,
        kind=kind_of(text),
        level="Error",
        text=text + more,
        kernel=said["kernel"],
        source=f"{said['path']}:{said['line']}",
        thread=_axes(said["thread"]),
        block=_axes(said["block"]),
        words=visible(match[0]),
    )


def _axes(text: str) -> str:
    """ "0,0,0" as records write it: "(0, 0, 0)"."""
    return f"({', '.join(part.strip() for part in text.split(','))})"
