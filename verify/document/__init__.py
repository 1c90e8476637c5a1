"""A page as data: a tree of frozen values, which `markdown`, `html` and `terminal` render.

Texts in the tree are plain: the renderers alone escape them, each in one place.  So the words of a
kernel or of a file may stand as text anywhere, and never act.  Looks, statuses, languages and the
targets of links are no texts: other values than the legal ones are refused with a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, get_args

from verify.document import text

Entry = TypeVar("Entry")
Kind = TypeVar("Kind")
Status = Literal["green", "red", "grey"]
Look = Literal["plain", "strong", "code", "soft", "good", "bad", "warn"]
Language = Literal["", "sh"]
_TARGET = re.compile(r"(?!/)#?[\w./%-]+")


def _check(value: object, legal: object) -> None:
    if value not in get_args(legal):
        raise ValueError(f"{value!r} is none of {', '.join(map(repr, get_args(legal)))}")


@dataclass(frozen=True)
class Span:
    """Text with a look.  bad: a failure.  warn: what a reader must see before the verdict."""

    text: str
    look: Look = "plain"

    def __post_init__(self) -> None:
        _check(self.look, Look)


@dataclass(frozen=True)
class Mark:
    """A status with its word: colour alone never says it."""

    status: Status
    word: str

    def __post_init__(self) -> None:
        _check(self.status, Status)


@dataclass(frozen=True)
class Number:
    """A number as a table shows it, right-aligned, and by which the table is sorted.

    value: a float may be NaN; a text stands for a number that JSON cannot hold ("inf"); None is not
    measured.  shown: by default `text.number` of the value.  unit: stands behind it.
    """

    value: float | str | None
    shown: str = ""
    unit: str = ""
    look: Look = "plain"

    def __post_init__(self) -> None:
        _check(self.look, Look)

    @property
    def text(self) -> str:
        shown = self.shown or text.number(self.value)
        return f"{shown} {self.unit}" if self.unit and self.value is not None else shown


@dataclass(frozen=True)
class Link:
    """A link to a file beside the page (quoted as in an address), or to a section ("#anchor")."""

    text: str
    target: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{self.target!r} is neither a file's name nor an anchor of the page")


Inline = str | Span | Mark | Number | Link
# one piece of text, or several after each other
Line = Inline | tuple[Inline, ...]
Row = tuple[Line, ...]


@dataclass(frozen=True)
class Paragraph:
    """note: a remark, in smaller letters."""

    line: Line
    note: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading below that of the section."""

    line: Line


@dataclass(frozen=True)
class Code:
    """Lines as they are: a message, or a command (language "sh")."""

    text: str
    language: Language = ""

    def __post_init__(self) -> None:
        _check(self.language, Language)


@dataclass(frozen=True)
class List:
    """One entry per line."""

    items: tuple[Line, ...]


@dataclass(frozen=True)
class Terms:
    """Names and what they stand for."""

    pairs: tuple[tuple[str, Line], ...]


@dataclass(frozen=True)
class Table:
    """Rows of typed cells under columns.

    A row may be shorter than the columns: its last cell spans the rest.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @cached_property
    def numeric(self) -> frozenset[int]:
        """The columns that hold a Number anywhere."""
        return frozenset(
            place for row in self.rows for place, cell in enumerate(row) if isinstance(cell, Number)
        )


@dataclass(frozen=True)
class Figure:
    """A picture, which HTML alone shows.

    draw: gives it as an <svg> element whose texts are escaped, or None where there is nothing to
    draw; it is called once.
    """

    name: str
    caption: str
    draw: Callable[[], str | None]

    @cached_property
    def svg(self) -> str | None:
        return self.draw()


@dataclass(frozen=True)
class Folded:
    """Blocks behind a line that opens them."""

    summary: Line
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Boxed:
    """Blocks of one failure (red), or of one doubt (grey)."""

    status: Status
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        _check(self.status, Status)


Block = Paragraph | Heading | Code | List | Terms | Table | Figure | Folded | Boxed


@dataclass(frozen=True)
class Section:
    """One section of a page.  anchor: its address in the page.  detail: left out of a page that
    would be too long."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]
    mark: Mark | None = None
    detail: bool = False


@dataclass(frozen=True)
class Document:
    """A page.  lead: what stands above the first section."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]

    def blocks(self, kind: type[Kind]) -> Iterator[Kind]:
        """Every block of that kind, folded ones too."""
        yield from _of_kind(kind, self.lead)
        for section in self.sections:
            yield from _of_kind(kind, section.blocks)


def _of_kind(kind: type[Kind], blocks: tuple[Block, ...]) -> Iterator[Kind]:
    for block in blocks:
        if isinstance(block, kind):
            yield block
        elif isinstance(block, Folded | Boxed):
            yield from _of_kind(kind, block.blocks)


def pieces(line: Line) -> tuple[Inline, ...]:
    """The pieces of a line, however many."""
    return line if isinstance(line, tuple) else (line,)


def ratio(r: float | None) -> Number:
    """r: bad above 1, and with NaN."""
    return Number(r, text.ratio(r), look="plain" if r is None or r <= 1 else "bad")


def count(value: int | None) -> Number:
    """An integer with its thousands apart."""
    return Number(value, text.count(value))


def seconds(value: float | None) -> Number:
    """A duration in a unit that suits it."""
    return Number(value, text.seconds(value))


LISTED = 200  # entries of lists that a bad day makes long


def listed(
    entries: Sequence[Entry], more: Callable[[str], Entry], source: str = "report.json"
) -> tuple[Entry, ...]:
    """The first LISTED of these, then an entry, made by `more`, that says how many are left out."""
    if len(entries) <= LISTED:
        return tuple(entries)
    return *entries[:LISTED], more(f"… and {len(entries) - LISTED} more in {source}.")


def left_out(left: Iterable[tuple[str, str]]) -> tuple[Block, ...]:
    """(name, reason) of what was not run, folded by reason."""
    return tuple(
        Folded(f"Not run, {len(names)}: {reason}", (Paragraph(", ".join(names), note=True),))
        for reason, names in text.grouped(left)
    )
