"""Check links: of the Markdown in the repository, and of the site that was built of it.

A link inside must lead to a file that is there and to an anchor that this file has.  A link to
another host is held against the form of a URL alone: nothing is fetched.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs.site import markdown

_SCHEMES = ("http", "https", "mailto")
# Elements without an end tag, and those whose end tag HTML lets one leave away.
_VOID = frozenset(re.findall(r"\w+", "area base br col embed hr img input link meta source wbr"))
_OPTIONAL = frozenset(re.findall(r"\w+", "dd dt li option p tbody td tfoot th thead tr"))


def check_markdown(root: Path, names: list[str]) -> list[str]:
    """What is wrong with the links of pages of the repository, one line for each."""
    return [
        f"{name}: {link}: {wrong}"
        for name in names
        for link in _page(root / name).links()
        if (wrong := _markdown_link(root, name, link))
    ]


def check_site(out: Path) -> list[str]:
    """What is wrong with the pages of a site, one line for each fault: a link that leads nowhere,
    an id that is there twice, a tag that is not closed, or something that is loaded from a host."""
    pages = {
        path.relative_to(out).as_posix(): read_html(path.read_text(encoding="utf-8"))
        for path in sorted(out.rglob("*.html"))
    }
    found: list[str] = []
    for name, page in pages.items():
        found += [f"{name}: {wrong}" for wrong in page.faults]
        found += [f"{name}: id {id!r} is there {count} times" for id, count in page.twice()]
        for link in page.links:
            if wrong := _site_link(out, pages, name, link):
                found.append(f"{name}: {link}: {wrong}")
        found += [
            f"{name}: loads {source} from a host" for source in page.loads if _external(source)
        ]
    return found


@dataclass
class HtmlPage:
    """What the check reads of a page.

    links: targets of `a`, `link`, `img` and `script`; loads: those of them that a browser fetches
    by itself; faults: of its tags.
    """

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def twice(self) -> list[tuple[str, int]]:
        """The ids that are there more than once."""
        return [(id, count) for id, count in Counter(self.ids).items() if count > 1]


def read_html(text: str) -> HtmlPage:
    """Read a page."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    reader.page.faults += [
        f"line {line}: <{tag}> is not closed" for tag, line in reader.open_tags()
    ]
    return reader.page


class _Reader(HTMLParser):
    """Ids, links, and whether each tag is closed by its own end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.page = HtmlPage()
        self._stack: list[tuple[str, int]] = []

    def open_tags(self) -> list[tuple[str, int]]:
        """Tags that are still open and must not be."""
        return [(tag, line) for tag, line in self._stack if tag not in _OPTIONAL]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.page.ids += [value for name, value in attrs if name == "id" and value]
        for name in ("href", "src", "xlink:href"):
            value = given.get(name)
            if value is not None:
                self.page.links.append(value)
                if tag != "a":
                    self.page.loads.append(value)
        if tag not in _VOID:
            self._stack.append((tag, self.getpos()[0]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._stack.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._stack:
            name, line = self._stack.pop()
            if name == tag:
                return
            if name not in _OPTIONAL:
                self.page.faults.append(f"line {line}: <{name}> is closed by </{tag}>")
                return
        self.page.faults.append(f"line {self.getpos()[0]}: </{tag}> closes nothing")


def _markdown_link(root: Path, name: str, link: str) -> str | None:
    """What is wrong with a link of a page of the repository, or None."""
    if _external(link):
        return _form(link)
    path, _, anchor = unquote(link).partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
    if target.startswith(".."):
        return "leads out of the repository"
    if not (root / target).is_file():
        return "no such file"
    if not anchor:
        return None
    if target.endswith(".md"):
        anchors = {heading.anchor for heading in _page(root / target).headings}
        return None if anchor in anchors else f"{target} has no heading for this anchor"
    line = re.fullmatch(r"L(\d+)", anchor)
    lines = (root / target).read_text(encoding="utf-8").count("\n")
    return None if line and 1 <= int(line[1]) <= lines else f"{target} has no such line"


def _site_link(out: Path, pages: dict[str, HtmlPage], name: str, link: str) -> str | None:
    """What is wrong with a link of a page of the site, or None."""
    if _external(link):
        return _form(link)
    path, _, anchor = unquote(link).partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
    if target.startswith(".."):
        return "leads out of the site"
    if not (out / target).is_file():
        return "no such file"
    if anchor and target in pages and anchor not in pages[target].ids:
        return f"{target} has no such id"
    return None


def _external(link: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE) is not None


def _form(link: str) -> str | None:
    """What is wrong with the form of a URL, or None."""
    try:
        parts = urlsplit(link)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in _SCHEMES:
        return f"must begin with one of {', '.join(_SCHEMES)}"
    if re.search(r"[\s<>\"{}|\\^`]", link):
        return "holds a character that no URL has"
    if parts.scheme != "mailto" and not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.hostname or ""):
        return "names no host"
    return None


@cache
def _page(path: Path) -> markdown.Page:
    return markdown.parse(path.read_text(encoding="utf-8"))


def pages_of(root: Path) -> Iterator[str]:
    """The Markdown pages of the repository that people write or read."""
    for path in sorted(
        [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("reports/*.md")]
    ):
        yield path.relative_to(root).as_posix()
