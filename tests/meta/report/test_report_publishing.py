"""Publishing: a report replaces another only if it covers at least as much, and every command says
what it made."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import BINS, DEVICE, evidence, of
from tests.meta.report.test_report_states import campaign
from verify import cli
from verify.bundle import ROOT
from verify.campaign import runner
from verify.evidence import Evidence, Recorder
from verify.report import Report, build, plots, read, write
from verify.report.publishing import LossError, losses, publish
from verify.variant import Support

SLUG = str(DEVICE["slug"])


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and cover nothing."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


@pytest.fixture(scope="module")
def old() -> Report:
    return build(evidence(20), BINS)


def changed(old: Report, change: Callable[[Any], object]) -> Report:
    new = copy.deepcopy(old)
    change(new)
    return new


def dtype(report: Report, ref: str) -> Any:
    return of(report, ref)["dtypes"][0]


class TestLosses:
    def test_an_equal_report_loses_nothing(self, old: Report) -> None:
        assert losses(old, copy.deepcopy(old)) == []

    def test_more_loses_nothing(self, old: Report) -> None:
        assert losses(old, build(evidence(40), BINS)) == []

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda new: new["variants"].remove(of(new, "torch-flash")),
                "torch-flash: 40 cases, none in the new report",
            ),
            (
                lambda new: of(new, "torch-flash").update(cases=0),
                "torch-flash: 40 cases, none in the new report",
            ),
            (
                lambda new: of(new, "torch-flash")["dtypes"].pop(0),
                "torch-flash, float16: 20 cases, none in the new report",
            ),
            (
                lambda new: dtype(new, "torch-flash").update(cases=0),
                "torch-flash, float16: 20 cases, none in the new report",
            ),
            (
                lambda new: dtype(new, "torch-flash").update(cases=17),
                "torch-flash, float16: 17 cases, 20 before",
            ),
            (
                lambda new: dtype(new, "torch-flash").update(oracles=[]),
                "torch-flash, float16: nothing judged in bound, exact",
            ),
            (
                lambda new: dtype(new, "torch-flash")["bins"].update(gqa=0),
                "torch-flash, float16: coverage bins that were filled and are empty: gqa",
            ),
            (
                lambda new: of(new, "triton-fwd")["builds"].pop(0),
                "triton-fwd: 2 builds for sm_80, none in the new report",
            ),
        ],
    )
    def test_what_is_lost_is_named(
        self, old: Report, change: Callable[[Any], object], said: str
    ) -> None:
        assert losses(old, changed(old, change)) == [said]

    def test_draws_that_repeat_are_no_loss(self, old: Report) -> None:
        assert (
            losses(old, changed(old, lambda new: dtype(new, "torch-flash").update(cases=18))) == []
        )

    @pytest.mark.parametrize(("group", "lost"), [("refusal", False), ("counting", True)])
    def test_a_refusal_that_two_dtypes_draw_is_of_one(
        self, old: Report, group: str, lost: bool
    ) -> None:
        lines = len(of(old, "torch-flash")["dtypes"])
        row = {"oracle": group, "group": group, "cases": 2}

        def judged(count: int) -> Report:
            """A report in which the last few dtypes have cases of the group."""

            def judge(new: Any) -> None:
                for line in of(new, "torch-flash")["dtypes"][lines - count :]:
                    line["oracles"].append(row)

            return changed(old, judge)

        said = [f"torch-flash, float16: nothing judged in {group}"]
        assert lines > 1
        assert losses(judged(lines), judged(lines - 1)) == said * lost

    def test_what_was_not_judged_cannot_be_lost(self, old: Report) -> None:
        assert losses(
            old, changed(old, lambda new: new["variants"].remove(of(new, "gluon-hopper")))
        ) == ["gluon-hopper: 1 builds for sm_90a, none in the new report"]
        empty = changed(old, lambda new: of(new, "gluon-hopper").update(builds=[]))
        assert (
            losses(
                empty, changed(empty, lambda new: new["variants"].remove(of(new, "gluon-hopper")))
            )
            == []
        )


class TestPublish:
    def test_where_nothing_lies(self, old: Report, tmp_path: Path) -> None:
        page, lost = publish(old, tmp_path / "reports" / SLUG)
        assert (page, lost) == (tmp_path / "reports" / SLUG / "report.html", [])

    def test_less_replaces_nothing_unless_told(self, old: Report, tmp_path: Path) -> None:
        write(old, tmp_path)
        before = (tmp_path / "report.json").read_bytes()
        fewer = build(evidence(4), BINS)
        with pytest.raises(LossError) as refusal:
            publish(fewer, tmp_path)
        assert "torch-flash, float16: 4 cases, 20 before" in refusal.value.losses
        assert (tmp_path / "report.json").read_bytes() == before
        _, lost = publish(fewer, tmp_path, replace=True)
        assert lost == refusal.value.losses
        assert read(tmp_path)["cases"] == fewer["cases"]

    @pytest.mark.parametrize("content", ["{", '{"schema": 99}'])
    def test_what_does_not_read_is_not_replaced_in_silence(
        self, old: Report, tmp_path: Path, content: str
    ) -> None:
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(LossError) as refusal:
            publish(old, tmp_path)
        assert refusal.value.losses[0].startswith("what lies there cannot be compared: ")


class TestCommand:
    """verify report of evidence that is there."""

    def record(self, folder: Path, found: Evidence, name: str = "one") -> None:
        with Recorder(folder / ".verify" / "runs" / name, "gw0") as recorder:
            run = dataclasses.replace(found.run, run=name)
            for item in (run, *found.variants, *found.verdicts, *found.drawn):
                recorder.write(item)

    def told(self, *words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["report", *words], standalone_mode=False)
        if isinstance(done.exception, cli.UsageError):
            return cli.USAGE, done.exception.format_message()
        assert done.exception is None, done.output
        return done.return_value, done.output

    @pytest.fixture
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        # No bin is required: what is judged here is what the command does.
        monkeypatch.setattr("verify.problem.coverage.bins_reachable", lambda support: ())
        return tmp_path

    def test_no_tracked_file_is_written(self, here: Path) -> None:
        self.record(here, campaign())
        assert self.told("--run", "one")[0] == runner.CLEAN
        assert (here / ".verify" / "report" / SLUG / "report.html").is_file()
        assert [path.name for path in here.iterdir()] == [".verify"]

    def test_published_and_refused_and_replaced(self, here: Path) -> None:
        whole = campaign()
        self.record(here, whole)
        half = tuple(verdict for verdict in whole.verdicts if verdict.dtype == "bfloat16")
        self.record(here, dataclasses.replace(whole, verdicts=half), "two")
        status, said = self.told("--run", "one", "--publish")
        assert status == runner.CLEAN
        assert "published: " in said
        target = here / "reports" / SLUG / "report.json"
        before = target.read_bytes()
        status, said = self.told("--run", "two", "--publish")
        lines = " ".join(said.split())
        assert status == runner.USAGE
        assert (
            "covers more than the new report, which is not published; --replace publishes it all"
            " the same" in lines
        )
        assert "mine, float16: " in said
        assert target.read_bytes() == before
        status, said = self.told("--run", "two", "--publish", "--replace")
        assert status == runner.INFRASTRUCTURE  # published, and as incomplete as it is
        assert "covered more, and was replaced. This is lost:" in said
        assert target.read_bytes() != before
        # together they cover it
        assert self.told("--run", "one", "--run", "two", "--publish")[0] == runner.CLEAN

    def test_what_lies_beside_the_published_report_counts(self, here: Path) -> None:
        self.record(here, campaign())
        (here / "reports" / SLUG).mkdir(parents=True)
        (here / "reports" / SLUG / "sanitizer.json").write_text("{")
        self.told("--run", "one", "--publish")
        assert "beside" not in read(here / ".verify" / "report" / SLUG)
        assert read(here / "reports" / SLUG)["beside"][0]["name"] == "sanitizer"

    @pytest.mark.parametrize(
        "words", [("--replace",), ("--render", ".", "--publish"), ("--render", ".", "--run", "one")]
    )
    def test_options_that_contradict_each_other(self, here: Path, words: tuple[str, ...]) -> None:
        status, said = self.told(*words)
        assert status == runner.USAGE
        assert "\n" not in said

    @pytest.mark.parametrize(
        ("declared", "said"),
        [
            ({"support": {"max_seqlen": 1}}, "mine: narrow: seqlen <= 1"),
            ({"ratio": 107.0}, "mine: lenient: bound 107x the best (float16)"),
        ],
    )
    def test_strict(self, here: Path, declared: dict[str, Any], said: str) -> None:
        self.record(here, campaign(**declared))
        status, plain = self.told("--run", "one")
        assert status == runner.CLEAN
        assert said.removeprefix("mine: ") in plain
        status, strict = self.told("--run", "one", "--strict")
        assert status == runner.FAILED
        assert f"--strict: {said}" in strict

    def test_strict_has_nothing_against_honest_declarations(self, here: Path) -> None:
        self.record(here, campaign())
        assert self.told("--run", "one", "--strict")[0] == runner.CLEAN

    def test_an_incomplete_run_is_no_success(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "verify.problem.coverage.bins_reachable", lambda support: ("never filled",)
        )
        self.record(here, campaign())
        status, said = self.told("--run", "one")
        assert status == runner.INFRASTRUCTURE
        assert "incomplete: mine: 1 of 1 coverage bins empty" in said

    def test_a_pass_beyond_its_bound_fails(self, here: Path) -> None:
        found = campaign()
        tampered = tuple(
            dataclasses.replace(v, measures=v.measures | {"r_out": 1e6}) for v in found.verdicts[:1]
        )
        self.record(here, dataclasses.replace(found, verdicts=tampered + found.verdicts[1:]))
        assert self.told("--run", "one")[0] == runner.FAILED
        assert read(here / ".verify" / "report" / SLUG)["status"] == "red"

    def test_words_that_no_encoding_holds_cost_no_report(self, here: Path) -> None:
        found = campaign()
        failed = dataclasses.replace(
            found.verdicts[0], outcome="fail", config="\udc80\u202e\x1b[31m"
        )
        broken = build(dataclasses.replace(found, verdicts=(failed, *found.verdicts[1:])), BINS)
        paths = write(broken, here / "pages")
        assert all(path.read_text(encoding="utf-8") for path in paths)
        (failure,) = read(here / "pages")["variants"][0]["failing"]
        assert failure["config"] == failed.config
        assert not {"\udc80", "\u202e", "\x1b"} & set(paths[1].read_text() + paths[2].read_text())

    def test_an_error_of_a_page_costs_no_report(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object, **__: object) -> str:
            raise KeyError("<b>what\na kernel said</b>")

        monkeypatch.setattr("verify.report.document.sections", fails)
        paths = write(build(campaign(), BINS), here / "pages")
        assert read(here / "pages")["status"] == "green"
        for path in paths[1:]:
            assert "This page could not be made" in path.read_text()
            assert "<b>" not in path.read_text()

    def test_an_error_of_a_renderer_or_a_picture_costs_no_report(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object, **__: object) -> str:
            raise KeyError("<b>what\na kernel said</b>")

        monkeypatch.setattr(plots, "ratio_plot", fails)
        page = write(build(campaign(), BINS), here / "pages")[2].read_text()
        assert "A picture could not be drawn: " in page
        assert "Device and sources" in page
        assert "<b>" not in page
        monkeypatch.setattr("verify.document.html._table", fails)
        monkeypatch.setattr("verify.document.markdown._table", fails)
        for path in write(build(campaign(), BINS), here / "pages")[1:]:
            assert "This page could not be made" in path.read_text()
            assert "<b>" not in path.read_text()


def test_a_support_that_no_version_takes_is_refused_in_one_line(tmp_path: Path) -> None:
    found = campaign(support={"masks": ["banana"]})
    with pytest.raises(
        ValueError, match="mine: its support on record is no declaration of this version"
    ) as refusal:
        build(found)
    assert "\n" not in str(refusal.value)
    assert Support(dtypes=("float16",), head_dims=(64,)).masks


def test_the_committed_reports_travel_light() -> None:
    """Fewer than 9 MB in all: every clone and every sdist carries them."""
    files = [path for path in (ROOT / "reports").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 9 * 10**6
