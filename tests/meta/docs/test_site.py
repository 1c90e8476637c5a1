"""The site of the documents: where links go, and a check that finds each that leads nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site import __main__ as command
from docs.site import links, markdown
from docs.site.build import ROOT, BuildError, build
from verify.bundle import ROOT as JUDGES_ROOT

README = """# A project

See [the page](docs/page.md#two-words), [a source](verify/x.py#L2), ![a plot](plot.svg) and
[elsewhere](https://example.org/a?b=c). Code names `verify/x.py`, `verify/gone.py` and `x.py`.
"""
PAGE = """# Page

## Two words

| a | b |
| --- | --- |
| <i>not markup</i> | [up](../README.md) |

## Two words

```python
x = [1, 2](3)
```
"""
GROUPS = (("Start", ("README.md",)), ("All", ("docs/page.md",)))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in {
        "README.md": README,
        "docs/page.md": PAGE,
        "docs/site/site.css": "",
        "verify/document/page.css": "",
        "verify/x.py": "a = 1\nb = '<'\n",
        "plot.svg": "<svg></svg>",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_links_go_to_pages_sources_and_copies(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    assert build(repository, out, GROUPS) == 4
    index = (out / "index.html").read_text(encoding="utf-8")
    for target in (
        'href="docs/page.html#two-words"',
        'href="verify/x.py.html#L2"',
        'src="plot.svg"',
        'href="https://example.org/a?b=c"',
        '<a href="verify/x.py.html"><code>verify/x.py</code></a>',
        "<code>verify/gone.py</code>",
        '<a href="docs/page.html">Page</a>',
    ):
        assert target in index
    assert index.count('href="verify/x.py.html"') == 1
    page = (out / "docs/page.html").read_text(encoding="utf-8")
    for part in (
        'id="two-words"',
        'id="two-words-1"',
        "&lt;i&gt;not markup",
        'href="../index.html"',
        '<div class="scroll"><table>',
    ):
        assert part in page
    source = (out / "verify/x.py.html").read_text(encoding="utf-8")
    assert '<span id="L2">' in source
    assert "&lt;" in source
    assert (out / "plot.svg").is_file()
    assert links.check_site(out) == []
    assert links.check_markdown(repository, ["README.md", "docs/page.md"]) == []


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("docs/gone.md", "no such file"),
        ("docs", "no such file"),
        ("../README.md", "leads out of the repository"),
        ("docs/page.md#two-word", "docs/page.md has no heading for this anchor"),
        ("#nowhere", "README.md has no heading for this anchor"),
        ("verify/x.py#L3", "verify/x.py has no such line"),
        ("https:///path", "names no host"),
        ("https://host", "names no host"),
        ("https://example.org:port/", "Port could not be cast"),
        ("ftp://example.org/", "must begin with one of"),
    ],
)
def test_a_link_of_a_page_that_leads_nowhere(repository: Path, link: str, wrong: str) -> None:
    name = "README.md"
    (repository / name).write_text(f"# A project\n\n[x]({link})\n", encoding="utf-8")
    (said,) = links.check_markdown(repository, [name])
    assert said.startswith(f"{name}: {link}: {wrong}")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<a href="gone.html">x</a>', "gone.html: no such file"),
        ('<a href="#gone">x</a>', "#gone: x.html has no such id"),
        ('<a href="../x.html">x</a>', "../x.html: leads out of the site"),
        ("<p><b>x</p>", "line 1: <b> is closed by </p>"),
        ("<div>", "line 1: <div> is not closed"),
        ("</div>", "line 1: </div> closes nothing"),
        ('<p id="a"></p><p id="a"></p>', "id 'a' is there 2 times"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
    ],
)
def test_a_fault_of_the_site(tmp_path: Path, body: str, wrong: str) -> None:
    (tmp_path / "x.html").write_text(f"<br>{body}", encoding="utf-8")
    assert any(wrong in said for said in links.check_site(tmp_path))


def test_tags_that_need_no_end() -> None:
    page = links.read_html("<ul><li>a<li>b</ul><table><tr><td>1<td>2</table><img src=x>")
    assert page.faults == []


def test_a_page_without_a_place_and_a_link_to_nothing_make_no_site(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "docs" / "new.md").write_text("# New\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"docs/new\.md: no group"):
        build(repository, tmp_path / "site", GROUPS)
    (repository / "docs" / "new.md").write_text("[x](gone.py)\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"docs/new\.md: gone\.py is no file"):
        build(repository, tmp_path / "site", (*GROUPS, ("New", ("docs/new.md",))))


def test_anchors_are_those_of_code_hosts() -> None:
    assert markdown.slug_of("`verify run`: the *first* line, r <= 1") == (
        "verify-run-the-first-line-r--1"
    )
    page = markdown.parse("# `verify run`: *x*\n")
    assert page.headings[0].anchor == "verify-run-x"


@pytest.mark.skipif(
    not (ROOT / "reports" / "index.md").is_file(), reason="an sdist has no pages of reports"
)
def test_every_link_of_the_documents_leads_somewhere() -> None:
    """The site itself is built and checked by `tox -e docs`, in CI."""
    names = list(links.pages_of(ROOT))
    assert {"README.md", "docs/api.md", "docs/quick-starts/ci.md", "reports/index.md"} <= set(names)
    assert links.check_markdown(ROOT, names) == []
    assert ROOT == JUDGES_ROOT


def test_a_folder_that_is_no_site_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").touch()
    assert command.main([str(tmp_path)]) == 2
    assert "is no site" in capsys.readouterr().out
    assert (tmp_path / "mine.txt").exists()
    assert command.main(["--help"]) == 2
