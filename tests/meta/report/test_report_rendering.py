"""Reports as people see them: pages, plots and tables, in which nothing from a kernel may act."""

import dataclasses
import html.parser
import math
import re
from base64 import b64encode
from hashlib import sha256

import pytest

from tests.harness.fake_campaign import BINS, evidence, of, verdict
from tests.harness.rendered import as_html, as_markdown
from verify.document import markdown, text
from verify.evidence import Begin, Finding, NotRun
from verify.report import Report, build, compare, plots, render_comparison, svg


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class Elements(html.parser.HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


HOSTILE = (
    "<script>alert(1)</script>'\"|`$x_1$\x1b[31m\u202e\n# {{ 7*7 }} @someone https://x.invalid"
    " <!-- -->"
)


@pytest.fixture(scope="module")
def hostile() -> Report:
    """A report whose every string from outside is markup."""
    found = evidence(9)
    rename = {"triton-tutorial": HOSTILE}
    fields = {
        "config": HOSTILE,
        "oracle": HOSTILE,
        "group": HOSTILE,
        "case": HOSTILE,
        "problem": HOSTILE,
        "bins": (HOSTILE,),
    }
    finding = Finding(
        oracle=HOSTILE,
        message=HOSTILE,
        got=HOSTILE,
        bound=HOSTILE,
        where=HOSTILE,
        count=1,
        total=2,
        replay=HOSTILE,
    )
    declared = {
        "support": {HOSTILE: HOSTILE},
        "numerics": {HOSTILE: HOSTILE},
        "contract": {HOSTILE: [HOSTILE]},
    }
    names = {
        "family": HOSTILE,
        "path": HOSTILE,
        "configs": (HOSTILE,),
        "source_hash": HOSTILE,
        "name": HOSTILE,
    }
    names |= {"entries": (HOSTILE,), "gradients": {HOSTILE: HOSTILE}}
    builds = [
        dataclasses.replace(b, variant=HOSTILE, arch=HOSTILE, build=f"{HOSTILE}{i}")
        for i, b in enumerate(found.builds)
    ]
    builds = [dataclasses.replace(b, error=b.error and HOSTILE) for b in builds]
    entries = [
        dataclasses.replace(e, ref=rename.get(e.ref, e.ref), **declared, **names)
        for e in found.variants
    ]
    verdicts = [
        dataclasses.replace(v, variant=HOSTILE, dtype=HOSTILE)
        for v in found.verdicts
        if v.variant in rename
    ]
    verdicts += [
        dataclasses.replace(
            verdicts[0], outcome="fail", finding=finding, seconds={HOSTILE: 1.0}, **fields
        )
    ]
    return build(
        dataclasses.replace(
            found,
            runs=(
                dataclasses.replace(
                    found.runs[0],
                    run=HOSTILE,
                    profile=HOSTILE,
                    device={"name": HOSTILE},
                    versions={HOSTILE: HOSTILE},
                ),
            ),
            variants=tuple(entries),
            verdicts=tuple(verdicts),
            unstable=((HOSTILE, HOSTILE),),
            torn=(HOSTILE,),
            not_run=(NotRun(variant=HOSTILE, reason=HOSTILE, dtype=HOSTILE),),
            builds=tuple(builds),
            lost=(Begin(case=HOSTILE, phase="generate", time=0.0),),
        ),
        (HOSTILE + "2",),
    )


def prose(page: str) -> str:
    """A page of Markdown without its fenced blocks and code spans, which are shown verbatim."""
    found, fence = [], ""
    for line in page.splitlines():
        opening = re.match(r"`{3,}", line)
        if opening and not fence:
            fence = opening[0]
        elif fence and line == fence:
            fence = ""
        elif not fence:
            found.append(re.sub(r"`[^`]*`", "", line))
    assert not fence
    return "\n".join(found)


class TestEscaping:
    def test_html_has_no_foreign_element(self, hostile):
        page = as_html(hostile)
        tags = Elements(page).tags
        assert not {"iframe", "img", "link", "object", "embed"} & {tag for tag, _ in tags}
        assert not [
            name
            for _, attributes in tags
            for name in attributes
            if name.startswith("on") or name == "src"
        ]
        links = [
            attributes["href"] for tag, attributes in tags if tag == "a" or "href" in attributes
        ]
        assert set(links) <= {
            f"#{attributes['id']}" for _, attributes in tags if "id" in attributes
        }
        assert page.count("<script") == [tag for tag, _ in tags].count("script") == 1
        (allowed,) = re.findall(r"script-src 'sha256-([^']*)'", page)
        own = page[page.index("<script>") + len("<script>") : page.index("</script>")]
        assert b64encode(sha256(own.encode()).digest()).decode() == allowed
        assert "alert" not in own
        assert not {"\x1b", "\u202e"} & set(page)

    def test_html_refers_to_nothing_outside(self, report):
        page = as_html(report)
        references = [
            v
            for _, a in Elements(page).tags
            for k, v in a.items()
            if k in ("href", "src", "xlink:href")
        ]
        assert all(reference.startswith("#") for reference in references)
        assert "default-src 'none'" in page
        assert "@import" not in page
        assert not re.findall(r"url\((?!#)", page)

    def test_html_ids_are_unique_where_they_are_referred_to(self, report):
        ids = [a["id"] for _, a in Elements(as_html(report)).tags if "id" in a]
        assert len({i for i in ids if ids.count(i) > 1}) == 0

    def test_markdown_has_no_markup_from_outside(self, hostile):
        page = as_markdown(hostile)
        shown = prose(page)
        assert set(re.findall(r"<[^>]*>", shown)) == {
            "<details>",
            "</details>",
            "<summary>",
            "</summary>",
            "<code>",
            "</code>",
        }
        assert not re.search(r"@\w|https?://", shown)
        assert not {"\x1b", "\u202e"} & set(page)

    def test_markdown_tables_keep_their_columns(self, hostile):
        for block in re.findall(r"(?:^\|.*\n)+", as_markdown(hostile), re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1

    def test_plots_escape_and_read_no_formulas(self, hostile):
        image = plots.ratio_plot(hostile)
        assert "<script" not in image
        assert "&lt;script&gt;" in image

    def test_terminal_gets_no_escape_sequence(self, report, hostile):
        assert "\x1b" not in render_comparison(compare(report, hostile))


class TestPlots:
    def test_nothing_to_draw(self):
        empty = build(dataclasses.replace(evidence(), verdicts=()), BINS)
        assert plots.ratio_plot(empty) is None
        assert all(plots.error_plot(v, "v") is None for v in empty["variants"])

    def test_exact_and_not_finite_cases_draw(self):
        changes = [
            {"r_out": 0.0, "max_error_out": 0.0},
            {"r_out": math.inf, "max_error_out": math.inf},
            {"r_out": math.nan},
        ]
        verdicts = tuple(
            verdict("triton-fwd", "float16", 3 * i, measures={"seqlen_kv": 4.0} | c)
            for i, c in enumerate(changes)
        )
        report = build(dataclasses.replace(evidence(), verdicts=verdicts), BINS)
        assert "<svg" in plots.ratio_plot(report)
        assert plots.error_plot(of(report, "triton-fwd"), "v") is None

    def test_themed_by_the_page(self, report):
        image = plots.ratio_plot(report)
        assert "currentColor" in image
        assert svg.INK not in image
        assert "<?xml" not in image
        assert "metadata" not in image


def test_r_does_not_round_to_one():
    shown = [
        text.ratio(value)
        for value in (1.0, 1.0004, 0.9996, 0.12345, 0.0, math.nan, -math.inf, None)
    ]
    assert shown == ["1", "1.000400", "0.999600", "0.123", "0", "nan", "-inf", "–"]


def test_numbers_keep_what_people_read():
    shown = [text.number(value) for value in (0.12345, 999.4, 999.5, 3214.4, 1e6, -2500.0, "inf")]
    assert shown == ["0.123", "999", "1,000", "3,214", "1e+06", "-2,500", "inf"]
    assert text.value([]) == "none"


def test_a_beginning_is_shown_if_it_is_a_time():
    moments = [
        text.moment(one) for one in ("20261121T035403Z", "2025-01-01T00:00:00+00:00", "h100", "")
    ]
    assert moments == ["2026-11-21 03:54 UTC", "2025-01-01 00:00 UTC", "", ""]


def test_code_is_a_span_or_an_element():
    assert markdown.code("m128n64-a_b=1") == "`m128n64-a_b=1`"
    assert markdown.code("a`b|c") == "<code>a&#96;b&#124;c</code>"
