"""A document as one HTML page that opens offline; every text from outside is escaped here.

The page is complete without its script, which sorts tables and filters rows.  No other script can
run in it, and it asks for nothing outside itself.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape as _escape
from importlib.resources import files

from verify import document as doc
from verify.document import text


def escape(said: object) -> str:
    """Text for an element or an attribute, without control characters."""
    return _escape(text.plain(said))


def render(document: doc.Document, over: str = "") -> str:
    """The page; the same document gives the same bytes.  over: a line above the title."""
    style, script = (_file(name) for name in ("page.css", "page.js"))
    right = ", ".join(f".c{at} tr > :nth-child({at})" for at in range(1, _widest(document) + 1))
    style += f"{right} {{ text-align: right; white-space: nowrap; }}\n" if right else ""
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}';"
        " base-uri 'none'; form-action 'none'"
    )
    links = " ".join(_inline(doc.Link(s.title, f"#{s.anchor}")) for s in document.sections)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(document.title)}</title>\n<style>\n{style}</style>\n</head>",
            f'<body>\n<header>\n<p class="over">{escape(over)}</p>',
            f"<h1>{escape(document.title)}</h1>",
            *_blocks(document.lead),
            f"<nav>{links}</nav>\n</header>",
            *(line for section in document.sections for line in _section(section)),
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _widest(document: doc.Document) -> int:
    """The last column of numbers of any table, from 1."""
    found = (max(table.numeric, default=-1) for table in document.blocks(doc.Table))
    return 1 + max(found, default=-1)


def _file(name: str) -> str:
    return (files("verify.document") / name).read_text(encoding="utf-8")


def _section(section: doc.Section) -> Iterator[str]:
    mark = f" {_inline(section.mark)}" if section.mark is not None else ""
    yield f'<section>\n<h2 id="{escape(section.anchor)}">{escape(section.title)}{mark}</h2>'
    yield from _blocks(section.blocks)
    yield "</section>"


def _blocks(blocks: tuple[doc.Block, ...]) -> Iterator[str]:
    for block in blocks:
        match block:
            case doc.Paragraph(line, note):
                yield f"<p{' class=note' if note else ''}>{inline(line)}</p>"
            case doc.Heading(line):
                yield f"<h3>{inline(line)}</h3>"
            case doc.Code(content):
                yield f"<pre>{escape(content)}</pre>"
            case doc.List(items):
                yield "<ul>\n" + "\n".join(f"<li>{inline(item)}" for item in items) + "\n</ul>"
            case doc.Terms(pairs):
                rows = (f"<dt>{escape(name)}<dd>{inline(said)}" for name, said in pairs)
                yield f"<dl>{''.join(rows)}</dl>"
            case doc.Table():
                yield _table(block)
            case doc.Figure():
                yield from _figure(block)
            case doc.Folded(summary, inner):
                yield f"<details>\n<summary>{inline(summary)}</summary>\n<div>"
                yield from _blocks(inner)
                yield "</div>\n</details>"
            case doc.Boxed(status, inner):
                yield f'<div class="box {status}-edge">'
                yield from _blocks(inner)
                yield "</div>"


def _figure(figure: doc.Figure) -> Iterator[str]:
    try:
        picture = figure.svg
    except Exception as error:  # no error of a block may cost the page
        yield f"<p class=note>A picture could not be drawn: {escape(error)}</p>"
        return
    if picture is not None:
        yield f'<figure>\n<div class="scroll">{picture}</div>'
        yield f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>"


def inline(line: doc.Line) -> str:
    """A line as the content of an element."""
    return "".join(map(_inline, doc.pieces(line)))


def _inline(piece: doc.Inline) -> str:
    match piece:
        case doc.Mark(status, word):
            return f'<span class="chip {status}">{escape(word)}</span>'
        case doc.Link(said, target):
            return f'<a href="{escape(target)}">{escape(said)}</a>'
        case doc.Span(said, "code"):
            return f"<code>{escape(said)}</code>"
        case doc.Span(said, "strong"):
            return f"<strong>{escape(said)}</strong>"
        case doc.Span() | doc.Number():
            said = escape(piece.text)
            return said if piece.look == "plain" else f'<span class="{piece.look}">{said}</span>'
        case _:
            return escape(piece)


def _table(table: doc.Table) -> str:
    head = "".join(f"<th>{escape(name)}" for name in table.columns)
    rows = "\n".join(f"<tr>{''.join(_cells(table, row))}" for row in table.rows)
    # one class per column of numbers, on the table: a class on every cell makes a page large
    numeric = " ".join(f"c{at + 1}" for at in sorted(table.numeric))
    named = f' class="{numeric}"' if numeric else ""
    return (
        f'<div class="scroll"><table{named}>\n<thead><tr>{head}</thead>\n<tbody>\n{rows}\n'
        "</tbody></table></div>"
    )


def _cells(table: doc.Table, row: doc.Row) -> Iterator[str]:
    for at, cell in enumerate(row):
        span = len(table.columns) - at if at == len(row) - 1 else 1
        across = f" colspan={span}" if span > 1 else ""
        match cell:
            case doc.Number(value):
                look = "" if cell.look == "plain" else f" class={cell.look}"
                yield f"<td{look}{_key(value, cell.text)}{across}>{escape(cell.text)}"
            case doc.Span(said, look) if look not in ("plain", "code"):
                yield f"<td class={look}{across}>{escape(said)}"
            case _:
                yield f"<td{across}>{inline(cell)}"


def _key(value: float | str | None, shown: str) -> str:
    """What the script sorts by, where the text is no number to it."""
    if value is None:
        return ""
    try:
        float(shown.replace(",", ""))
    except ValueError:
        return f' data-v="{escape(value)}"'
    return ""
