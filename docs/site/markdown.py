"""A Markdown page as HTML: headings with anchors, highlighted code, and links that a caller
rewrites."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

_PLAIN = HtmlFormatter(nowrap=True)
# Raw HTML stays text: a page holds nothing but Markdown.
_PARSER = MarkdownIt("js-default")


@dataclass(frozen=True)
class Heading:
    """A heading: 1 to 6, its text, and the anchor that it has on the site and on code hosts."""

    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Page:
    """A parsed page.  tokens: markdown-it's; headings: in their order."""

    tokens: list[Token]
    headings: tuple[Heading, ...]

    @property
    def title(self) -> str:
        """The first heading, or nothing."""
        return self.headings[0].text if self.headings else ""

    def links(self) -> Iterator[str]:
        """The targets of its links and images, as they are written."""
        for token in _inline(self.tokens):
            target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
            if isinstance(target, str):
                yield target


def parse(text: str) -> Page:
    """Parse a page and give its headings anchors."""
    tokens = _PARSER.parse(text)
    found: list[Heading] = []
    taken: dict[str, int] = {}
    for at, token in enumerate(tokens):
        if token.type != "heading_open":
            continue
        said = _text(tokens[at + 1])
        slug = slug_of(said)
        count = taken.get(slug, 0)
        taken[slug] = count + 1
        anchor = f"{slug}-{count}" if count else slug
        token.attrSet("id", anchor)
        found.append(Heading(int(token.tag[1:]), said, anchor))
    return Page(tokens, tuple(found))


def slug_of(heading: str) -> str:
    """The anchor that code hosts give a heading: lower case, without punctuation, hyphens for
    blanks."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def render(page: Page, rewrite: Callable[[str], str], of_code: Callable[[str], str | None]) -> str:
    """HTML of a page, whose tokens it changes.

    rewrite: the target of a link or image, from the one that is written.  of_code: the target for a
    piece of inline code, or None if it is no link.
    """
    for token in page.tokens:
        if token.children is not None:
            token.children = list(_linked(token.children, rewrite, of_code))
    return "".join(_blocks(page.tokens))


def code(text: str, language: str = "", file: str = "") -> list[str]:
    """Highlighted HTML of some code, line by line.  language or file: what it is written in."""
    try:
        lexer = (
            get_lexer_for_filename(file, stripnl=False)
            if file
            else get_lexer_by_name(language, stripnl=False)
        )
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return str(highlight(text, lexer, _PLAIN)).rstrip("\n").split("\n")


def _blocks(tokens: list[Token]) -> Iterator[str]:
    """The HTML of block tokens: wide tables scroll, fences are highlighted."""
    renderer = _PARSER.renderer
    for at, token in enumerate(tokens):
        if token.type == "fence":
            lines = "\n".join(code(token.content, token.info.strip()))
            yield f"<pre>{lines}</pre>\n"
        elif token.type == "code_block":
            yield f"<pre>{escape(token.content)}</pre>\n"
        elif token.type == "table_open":
            yield '<div class="scroll"><table>\n'
        elif token.type == "table_close":
            yield "</table></div>\n"
        elif token.type == "heading_close":
            anchor = tokens[at - 2].attrGet("id")
            yield f' <a class="anchor" href="#{anchor}" aria-label="link to here">#</a>'
            yield f"</{token.tag}>\n"
        elif token.type == "inline":
            yield renderer.renderInline(token.children or [], _PARSER.options, {})
        else:
            yield renderer.renderToken(tokens, at, _PARSER.options, {})


def _linked(
    tokens: list[Token], rewrite: Callable[[str], str], of_code: Callable[[str], str | None]
) -> Iterator[Token]:
    """Inline tokens with their targets rewritten, and links around code that names a file."""
    depth = 0
    for token in tokens:
        depth += token.nesting if token.type in ("link_open", "link_close") else 0
        for name in ("href", "src"):
            target = token.attrGet(name)
            if isinstance(target, str):
                token.attrSet(name, rewrite(target))
        target = of_code(token.content) if token.type == "code_inline" and not depth else None
        if target is None:
            yield token
        else:
            yield Token("link_open", "a", 1, attrs={"href": target})
            yield token
            yield Token("link_close", "a", -1)


def _inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield from token.children or []


def _text(token: Token) -> str:
    """The text of an inline token, without its markup."""
    return "".join(
        "\n" if child.type == "softbreak" else child.content for child in token.children or []
    ).replace("\n", " ")
