"""Tables and short pages for the terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as Shown
from rich.text import Text

from verify.document import Block, Document, Line, Mark, Paragraph, Table, pieces, text

_STYLES = {"good": "green", "bad": "bold red", "warn": "bold yellow", "soft": "dim"}
_MARKS = {"green": "green", "red": "bold red", "grey": "yellow"}


def render(table: Table, title: str = "") -> Shown:
    """The table for rich; escape sequences in its texts lose their power."""
    shown = Shown(
        *(
            Column(name, overflow="fold", justify="right" if at in table.numeric else "left")
            for at, name in enumerate(table.columns)
        ),
        title=title or None,
    )
    for row in table.rows:
        shown.add_row(*map(inline, row))
    return shown


def inline(line: Line) -> Text:
    """A line with its looks as colours."""
    found = Text()
    for piece in pieces(line):
        if isinstance(piece, Mark):
            found.append(text.one_line(piece.word), style=_MARKS[piece.status])
        elif isinstance(piece, str):
            found.append(text.plain(piece))
        else:
            look = getattr(piece, "look", "")
            found.append(text.plain(piece.text), style=_STYLES.get(look, ""))
    return found


def page(document: Document, width: int) -> str:
    """The tables and paragraphs of a page as text of that width, without colours."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, color_system=None, highlight=False, emoji=False, markup=False
    )
    console.print(text.plain(document.title), soft_wrap=True)
    parts: list[Block] = [*document.lead]
    for section in document.sections:
        parts += [Paragraph(f"\n{section.title}"), *section.blocks]
    for part in parts:
        if isinstance(part, Paragraph):
            console.print(inline(part.line), soft_wrap=True)
        elif isinstance(part, Table):
            shown = render(part)
            shown.box, shown.show_edge, shown.pad_edge = box.SIMPLE_HEAD, False, False
            console.print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
