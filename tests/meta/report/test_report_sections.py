"""A section from outside the tree: shown in both renderings, at its place, and inert."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.fake_campaign import BINS, evidence
from tests.harness.rendered import as_markdown
from tests.meta.report.test_report_rendering import HOSTILE, Elements, prose
from verify import document as doc
from verify.report import Report, build, plots
from verify.report import sections as known
from verify.report.beside import Beside
from verify.report.document import document


def as_html(report: Report) -> str:
    """report.html, rendered anew: the sections change."""
    return doc.html.render(document(report, None))


MINE = '''
"""How many cases each variant has: a section of somebody else's."""

from verify.document import Code, Folded, Link, List, Number, Paragraph, Section, Span, Table
from verify.report.sections import register

SAID = {said!r}


def section(report, beside):
    if not report["cases"]:
        return None
    counts = {v["ref"]: Number(v["cases"], unit=SAID) for v in report["variants"]}
    rows = tuple((Span(ref, "strong"), count) for ref, count in counts.items())
    blocks = (
        Paragraph((SAID, Span(SAID, "warn"), Span(SAID, "code"), Link(SAID, "report.json"))),
        List((SAID,)),
        Code(SAID),
        Folded(SAID, (Table((SAID, "cases"), rows),)),
    )
    return Section(SAID, "mine", blocks)


register(section, order=15)
'''


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(6), BINS)


@pytest.fixture
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModuleType]:
    """One file in a folder of its own, imported as a user's program does it."""
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("{said!r}", repr(request.param)), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    known.unregister(module.section)


@pytest.mark.parametrize("mine", ["Cases by hand"], indirect=True)
def test_one_file_adds_a_section_to_both_renderings(mine: ModuleType, report: Report) -> None:
    page, body = as_markdown(report), as_html(report)
    titles = re.findall(r"(?m)^## (.*)$", page)
    assert titles[:3] == ["Verdicts", "Cases by hand", "Ranking"]
    assert re.findall(r"<h2[^>]*>([^<]*)", body)[:3] == titles[:3]
    assert '<a href="#mine">Cases by hand</a>' in body
    cases = {v["ref"]: v["cases"] for v in report["variants"]}
    for ref, count in cases.items():
        assert f"| **{ref}** | {count} Cases by hand |" in page
        assert f"<tr><td class=strong>{ref}<td" in body
    known.unregister(mine.section)
    assert "Cases by hand" not in as_markdown(report) + as_html(report)


@pytest.mark.parametrize("mine", [HOSTILE], indirect=True)
def test_hostile_words_in_it_are_inert(mine: ModuleType, report: Report) -> None:
    before = Elements(as_html(report)).tags
    known.unregister(mine.section)
    without = {tag for tag, _ in Elements(as_html(report)).tags}
    known.register(mine.section)
    page, body = as_markdown(report), as_html(report)
    assert {tag for tag, _ in before} <= without | {"strong", "ul", "li", "pre"}
    assert body.count("<script") == 1
    assert not [name for _, attributes in before for name in attributes if name.startswith("on")]
    shown = prose(page)
    assert "&#60;script&#62;" in shown
    assert "<script" not in shown
    assert not re.search(r"@\w|https?://", shown)
    assert not {"\x1b", "\u202e"} & set(page + body)


def test_a_section_that_has_nothing_to_say_is_left_out(report: Report) -> None:
    titles = [section.title for section in known.sections(report, Beside())]
    assert titles[0] == "Verdicts"
    assert titles[-1] == "Device and sources"
    empty = {**report, "lost": [], "torn": [], "unstable": [], "not_run": []}
    left = [section.title for section in known.sections(empty, Beside())]  # type: ignore[arg-type]
    assert [title for title in titles if title not in left] == ["Not run", "Incomplete evidence"]


@pytest.mark.parametrize(
    "made",
    [
        lambda word: doc.Span("x", word),
        lambda word: doc.Number(1.0, look=word),
        lambda word: doc.Mark(word, "x"),
        lambda word: doc.Boxed(word, ()),
        lambda word: doc.Code("x", word),
        lambda word: doc.Link("x", word),
    ],
)
@pytest.mark.parametrize("word", [HOSTILE, "x onclick=alert(1)", "javascript:alert(1)", "//x.y/z"])
def test_what_is_no_text_is_refused(made: Callable[[str], object], word: str) -> None:
    with pytest.raises(ValueError, match="is n"):
        made(word)
