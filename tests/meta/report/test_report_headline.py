"""The first line of a report tells news from what is known; what never fails has a rate."""

import dataclasses
import html
import io
from datetime import date

import pytest
from rich.console import Console

from tests.harness.fake_campaign import BINS, evidence, of
from tests.harness.rendered import as_html, as_markdown
from verify.evidence import Drawn
from verify.evidence.known_failures import Xfail, Xfails
from verify.report import build, plots
from verify.report.headline import Failures, failures, headline
from verify.report.rate import draws, limit, rate
from verify.report.terminal import headline as terminal_headline
from verify.report.terminal import notes


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


def known(*oracles):
    return Xfails(
        (
            Xfail(
                cases="triton-tutorial.*",
                link="docs/findings.md, 1",
                expires=date(2030, 1, 1),
                witness="triton-tutorial",
                oracles=oracles,
            ),
        )
    )


def campaign(xfails=None, **changes):
    return build(dataclasses.replace(evidence(24), **changes), BINS, xfails=xfails)


def terminal(report):
    stream = io.StringIO()
    console = Console(file=stream, width=400)
    for line in (terminal_headline(report), *notes(report)):
        console.print(line)
    return stream.getvalue()


class TestFailures:
    def test_all_are_new_without_known_defects(self):
        found = campaign(builds=())
        kinds = [failure for v in found["variants"] for failure in v["failing"]]
        assert failures(found) == Failures(0, len(kinds))
        assert len(kinds) > 0

    def test_a_known_defect_counts_once_and_hides_no_other_failure(self):
        found = campaign(known(), builds=())
        kinds = [failure for v in found["variants"] for failure in v["failing"]]
        new = [failure for failure in kinds if "known" not in failure]
        assert len(kinds) - len(new) >= 1
        assert failures(found) == Failures(1, len(new))
        assert str(failures(found)).startswith("1 known failure, ")

    def test_an_oracle_that_no_defect_names_is_news(self):
        assert failures(campaign(known("no_such_oracle"), builds=())).known == 0

    def test_builds_and_files_beside_are_news(self):
        before = failures(campaign(builds=())).new
        found = campaign()
        broken = sum(bool(b["failing"]) for v in found["variants"] for b in v["builds"])
        assert broken > 0
        assert failures(found).new == before + broken
        entry = {"name": "probes", "status": "red", "said": "1 disagrees"}
        assert failures(found | {"beside": [entry]}).new == before + broken + 1
        assert failures(found | {"beside": [entry | {"status": "grey"}]}).new == before + broken

    def test_nothing_fails(self):
        found = campaign(verdicts=(), builds=())
        assert headline(found).startswith("0 known failures, 0 new. ")

    def test_it_is_the_first_line_everywhere(self):
        found = campaign(known())
        said = headline(found)
        assert said.startswith(f"{failures(found)}. ")
        assert terminal(found).splitlines()[0] == said
        title, blank, first = as_markdown(found).splitlines()[:3]
        assert title.startswith("# ")
        assert not blank
        assert said in html.unescape(first)
        page = html.unescape(as_html(found))
        assert said in page[page.index("</h1>") :].split("</p>", 1)[0]


class TestRate:
    @pytest.mark.parametrize("n", [1, 2, 59, 299, 12_487, 10**6])
    def test_limit_is_where_passing_all_is_one_chance_in_twenty(self, n):
        p = limit(n)
        assert (1 - p) ** n == pytest.approx(0.05, rel=1e-9)
        assert p <= 3 / n

    def test_a_variant_without_failures_has_one_everywhere(self):
        found = campaign()
        flash = of(found, "torch-flash")
        assert draws(flash) == sum(min(d["cases"], 328) for d in flash["dtypes"]) == 48
        said = "0 of 48 draws failing: the failure rate is below 6.1 % with 95 % confidence"
        assert rate(flash) == said
        pages = as_markdown(found), as_html(found), terminal(found)
        for page in pages:
            assert said in page
        for page in pages[:2]:
            assert "not of all possible problems" in " ".join(page.split())

    def test_what_fails_or_was_not_drawn_has_none(self):
        found = campaign()
        for ref in ("triton-tutorial", "gluon-hopper", "triton-backward"):
            assert rate(of(found, ref)) == ""
        assert rate(of(campaign(known()), "triton-tutorial")) == ""

    def test_refused_draws_do_not_count(self):
        drawn = (
            Drawn(variant="torch-flash", dtype="float16", group="bound", drawn=20, refused=17),
        )
        assert draws(of(campaign(drawn=drawn), "torch-flash")) == 3

    @pytest.mark.parametrize("n", [1, 7, 723, 25_944, 123_456_789])
    def test_the_percentage_said_is_no_smaller_than_the_limit(self, n):
        dtype = {"cases": n, "drawn": n, "refused": 0}
        variant = {"status": "green", "failures": 0, "failing": [], "dtypes": [dtype]}
        percent = float(rate(variant).split("below ")[1].split(" %")[0])
        assert 100 * limit(n) * (1 - 1e-9) <= percent <= 111 * limit(n)
