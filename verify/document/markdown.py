"""A document as Markdown for a forge; every text from outside is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify import document as doc
from verify.document import text

LIMIT = 500_000  # bytes: GitHub renders no text file over 512 kB, and no step summary over 1 MiB
MARKS: dict[doc.Status, str] = {"green": "✅", "red": "❌", "grey": "⬜"}

_MARKUP = re.compile(r"[&<>\\`*\[\]#|~$]|\b_|_\b|^[-+=](?=[\s=-]|$)")


def escape(said: object) -> str:
    """Text for a paragraph or table cell, with nothing in it that Markdown or HTML reads as
    markup."""
    # Character references never count as markup (CommonMark, section 2.5).  The zero-width blanks
    # keep a forge from notifying the person who is called like the word behind @, and from making
    # links of addresses.
    line = (
        text.one_line(said)
        .replace("@", "@\u200b")
        .replace("://", ":\u200b//")
        .replace("www.", "www\u200b.")
    )
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", line)


def code(said: object) -> str:
    """Text as code, in a table cell or elsewhere."""
    line = text.one_line(said)
    if not line or re.search(r"[`|\\]", line):  # a code span in a table cell cannot hold these
        return f"<code>{escape(line)}</code>"
    return f"`{line}`"


def render(document: doc.Document, rest: str = "", limit: int = 0) -> str:
    """The page, shorter than so many bytes, or than LIMIT.

    A page that would be longer loses its sections of details, for which it names `rest`, the place
    where they are; and is cut if it is too long still.
    """
    limit = limit or LIMIT
    whole = _page(document, document.sections)
    if len(whole.encode("utf-8", "backslashreplace")) < limit:
        return whole
    kept = tuple(section for section in document.sections if not section.detail)
    short = f"{_page(document, kept)}\nThe details are in {escape(rest)}.\n"
    note = f"\n\n(cut; the rest: {escape(rest)})\n"
    if len(short.encode("utf-8", "backslashreplace")) < limit:
        return short
    return short.encode()[: limit - len(note) - 1].decode(errors="ignore") + note


def _page(document: doc.Document, sections: tuple[doc.Section, ...]) -> str:
    parts = [f"# {escape(document.title)}", *_blocks(document.lead)]
    for section in sections:
        parts.append(f"## {escape(section.title)}")
        if section.mark is not None:
            parts.append(_inline(section.mark))
        parts += _blocks(section.blocks)
    return "\n\n".join(parts) + "\n"


def _blocks(blocks: tuple[doc.Block, ...]) -> Iterator[str]:
    """Each block as its lines; nothing for a picture."""
    for block in blocks:
        match block:
            case doc.Paragraph(line):
                yield inline(line)
            case doc.Heading(line):
                yield f"### {inline(line)}"
            case doc.Code(content, language):
                yield _fenced(content, language)
            case doc.List(items):
                yield "\n".join(f"- {inline(item)}" for item in items)
            case doc.Terms(pairs):
                yield _table(doc.Table(("", ""), pairs))
            case doc.Table():
                yield _table(block)
            case doc.Folded(summary, inner):
                yield f"<details><summary>{_summary(summary)}</summary>"
                yield from _blocks(inner)
                yield "</details>"
            case doc.Boxed(_, inner):
                yield from _blocks(inner)
            case doc.Figure():
                pass


def inline(line: doc.Line) -> str:
    """A line as text of a paragraph or a cell."""
    return "".join(map(_inline, doc.pieces(line)))


def _inline(piece: doc.Inline) -> str:
    match piece:
        case doc.Mark(status, word):
            return f"{MARKS[status]} **{escape(word)}**"
        case doc.Link(said, target):
            return escape(said) if target.startswith("#") else f"[{escape(said)}]({target})"
        case doc.Span(said, "code"):
            return code(said)
        case doc.Span(said, "warn"):
            return f"⚠️ **{escape(said)}**"
        case (doc.Number(look="strong" | "bad") | doc.Span(look="strong" | "bad")) as bold:
            return f"**{escape(bold.text)}**" if bold.text else ""
        case doc.Number() | doc.Span():
            return _beginning(piece.text)
        case _:
            return _beginning(piece)


def _beginning(said: str) -> str:
    """Escaped, with the blank at either end that parts it from its neighbours."""
    lead, tail = (" " if said.startswith(" ") else ""), (" " if said.endswith(" ") else "")
    return f"{lead}{escape(said)}{tail}" if said.strip() else lead


def _summary(line: doc.Line) -> str:
    """A line inside an HTML element, where Markdown's own marks say nothing."""
    return "".join(
        f"{MARKS[piece.status]} {escape(piece.word)}"
        if isinstance(piece, doc.Mark)
        else _beginning(piece if isinstance(piece, str) else piece.text)
        for piece in doc.pieces(line)
    )


def _fenced(content: str, language: str) -> str:
    """A fenced block whose fence no line of the content can close."""
    lines = [text.plain(line) for line in content.splitlines()] or [""]
    fence = "`" * max(
        3, *(len(line) - len(line.lstrip("`")) + line.count("`") + 1 for line in lines)
    )
    return "\n".join([fence + language, *lines, fence])


def _table(table: doc.Table) -> str:
    rules = (" ---: " if at in table.numeric else " --- " for at in range(len(table.columns)))
    lines = [f"| {' | '.join(map(escape, table.columns))} |", f"|{'|'.join(rules)}|"]
    for row in table.rows:
        cells = [*map(inline, row), *[text.NONE] * (len(table.columns) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
