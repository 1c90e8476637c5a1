"""Build the site: every document, and each file of the repository that a document links to.

The site has the repository's folders, so relative links go where they go in the repository: a page
`docs/x.md` becomes `docs/x.html`, README.md `index.html`, a source file `verify/y.py` the page
`verify/y.py.html`; images, JSON and reports are copied.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from pygments.formatters import HtmlFormatter

from docs.site import markdown
from docs.site.markdown import Page

ROOT = Path(__file__).resolve().parents[2]

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Start",
        (
            "README.md",
            "docs/how-a-verdict-is-reached.md",
            "docs/quick-starts/triton.md",
            "docs/quick-starts/cuda.md",
            "docs/quick-starts/library.md",
            "docs/quick-starts/ci.md",
            "docs/installation.md",
        ),
    ),
    (
        "Use",
        (
            "docs/adding-a-kernel.md",
            "docs/api.md",
            "docs/command-line.md",
            "docs/sanitizers.md",
            "docs/benchmarks.md",
            "docs/scale.md",
            "docs/performance.md",
            "docs/probes.md",
            "docs/security.md",
            "docs/report-schema.md",
            "docs/glossary.md",
        ),
    ),
    (
        "Reference",
        (
            "docs/reference/commands.md",
            "docs/reference/python.md",
            "docs/reference/environment.md",
            "docs/reference/files.md",
        ),
    ),
    (
        "How it judges",
        (
            "docs/oracles.md",
            "docs/applicability.md",
            "docs/adding-an-oracle.md",
            "docs/tolerance.md",
            "docs/tolerance-quantised.md",
            "docs/tolerance-backward.md",
            "docs/arithmetic.md",
            "docs/statistics.md",
            "docs/power.md",
            "docs/long-sequences.md",
            "docs/sensitivity.md",
            "docs/mutation.md",
        ),
    ),
    ("The collection", ("docs/triton.md", "docs/gluon.md", "docs/cute.md", "docs/ptx.md")),
    (
        "Project",
        (
            "docs/architecture.md",
            "docs/findings.md",
            "reports/index.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "CHANGELOG.md",
        ),
    ),
)
"""The pages by headings of the navigation.  A page of docs/ that is missing here is an error."""

COPIED = (".html", ".json", ".sarif", ".svg", ".png")
_SOURCE_FOLDERS = (".ci", "docs", "kernels", "references", "tests", "verify")
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class BuildError(Exception):
    """The documents cannot become a site; the message names the page and what to do."""


@dataclass
class Site:
    """A site that is being built.

    root: of the repository.  out: the site's folder.  groups: of the navigation, as GROUPS.
    pages: the parsed pages of the navigation.  wanted: files of the repository that pages link to.
    """

    root: Path
    out: Path
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    pages: dict[str, Page] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)

    def place(self, name: str) -> str:
        """The path on the site of a file of the repository; both with `/`."""
        if name == "README.md":
            return "index.html"
        if name.endswith(".md"):
            return f"{name[:-3]}.html"
        return name if name.endswith(COPIED) else f"{name}.html"

    def target(self, page: str, link: str) -> str:
        """The target on the site of a link that stands in a page of the repository."""
        path, _, anchor = link.partition("#")
        if not path or _EXTERNAL.match(link):
            return link
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if not (self.root / name).is_file():
            raise BuildError(f"{page}: {link} is no file of the repository")
        self.wanted.add(name)
        there = self.relative(page, self.place(name))
        return f"{there}#{anchor}" if anchor else there

    def of_code(self, page: str, code: str) -> str | None:
        """The target of inline code that is the path of a source file, or None."""
        known = code.startswith(tuple(f"{folder}/" for folder in _SOURCE_FOLDERS))
        if not known or ".." in code or not (self.root / code).is_file():
            return None
        return self.target(page, posixpath.relpath(code, posixpath.dirname(page) or "."))

    def relative(self, page: str, place: str) -> str:
        """A place of the site, seen from the page of a file of the repository."""
        return posixpath.relpath(place, posixpath.dirname(self.place(page)) or ".")

    def write(self, name: str, title: str, content: str, page: Page | None = None) -> None:
        """Write the page of a file of the repository."""
        path = self.out / self.place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "" if page is not None else ' class="source"'
        text = "\n".join(
            [
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(title)}</title>",
                f'<link rel="stylesheet" href="{self.relative(name, "site.css")}">',
                "</head>\n<body>",
                '<a class="menu" href="#pages">all pages</a>',
                f"<main{kind}>\n{content}</main>",
                *self._navigation(name, page),
                "</body>\n</html>\n",
            ]
        )
        path.write_text(text, encoding="utf-8")

    def _navigation(self, name: str, page: Page | None) -> Iterator[str]:
        yield '<nav id="pages" aria-label="pages">'
        for group, names in self.groups:
            yield f"<p>{escape(group)}</p>\n<ul>"
            for other in names:
                said = escape(_short(other, self.pages[other].title))
                here = ' aria-current="page"' if other == name else ""
                link = self.relative(name, self.place(other))
                yield f'<li><a href="{link}"{here}>{said}</a>'
                if other == name and page is not None:
                    yield from _sections(page)
                yield "</li>"
            yield "</ul>"
        yield "</nav>"


def build(root: Path, out: Path, groups: tuple[tuple[str, tuple[str, ...]], ...] = GROUPS) -> int:
    """Build the site of a repository into a folder, from nothing; returns the number of files.

    Raises BuildError: a document that no group of the navigation names, or a link to a file that is
    not there.
    """
    site = Site(root, out, groups)
    names = [name for _, group in groups for name in group]
    documents = {path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")}
    if lost := sorted(documents - set(names)):
        raise BuildError(f"{lost[0]}: no group of docs/site/build.py names it")
    for name in names:
        if not (root / name).is_file():
            raise BuildError(f"{name}: docs/site/build.py names it, and it is not there")
        site.pages[name] = _parsed(site, name)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / "site.css").write_text(_style(root), encoding="utf-8")
    done: set[str] = set()
    site.wanted |= set(names)
    while left := sorted(site.wanted - done):
        for name in left:
            _write(site, name)
        done |= set(left)
    return len(done)


def _write(site: Site, name: str) -> None:
    """Write what stands for a file of the repository: a page, a page of source, or a copy."""
    if name.endswith(".md"):
        page = site.pages.get(name) or _parsed(site, name)
        body = markdown.render(
            page,
            lambda link: site.target(name, link),
            lambda code: site.of_code(name, code),
        )
        site.write(name, page.title or name, body, page)
    elif name.endswith(COPIED):
        path = site.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site.root / name, path)
    else:
        text = (site.root / name).read_text(encoding="utf-8")
        lines = markdown.code(text, *_language(name, text))
        numbered = "\n".join(f'<span id="L{at}">{line}</span>' for at, line in enumerate(lines, 1))
        site.write(name, name, f"<h1>{escape(name)}</h1>\n<pre>{numbered}</pre>\n")


def _language(name: str, text: str) -> tuple[str, str]:
    """The language of a source file, or the name that tells it."""
    first = text.split("\n", 1)[0]
    for end, language in (("bash", "bash"), ("python3", "python")):
        if first.startswith("#!") and first.endswith(end):
            return language, ""
    return ("cuda", "") if name.endswith((".cu", ".cuh")) else ("", name)


def _parsed(site: Site, name: str) -> Page:
    return markdown.parse((site.root / name).read_text(encoding="utf-8"))


def _short(name: str, title: str) -> str:
    """What the navigation calls a page."""
    short = title.removeprefix("Quick start: ").removeprefix("The ")
    short = short[:1].upper() + short[1:]
    return f"Quick start: {short[0].lower()}{short[1:]}" if "/quick-starts/" in name else short


def _sections(page: Page) -> Iterator[str]:
    """The list of a page's sections."""
    found = [heading for heading in page.headings if heading.level == 2]
    if found:
        yield "<ul>"
        for heading in found:
            yield f'<li><a href="#{escape(heading.anchor)}">{escape(heading.text)}</a></li>'
        yield "</ul>"


def _style(root: Path) -> str:
    """The report's style, the colours of code, and what only the site has."""
    light = HtmlFormatter(style="friendly").get_style_defs("pre")
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    return "\n".join(
        [
            (root / "verify" / "document" / "page.css").read_text(encoding="utf-8"),
            light,
            f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}",
            (root / "docs" / "site" / "site.css").read_text(encoding="utf-8"),
        ]
    )
