"""`report --publish --keep`: a published report keeps what a new campaign did not judge."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.fake_campaign import BINS, evidence, of
from verify.evidence import Evidence
from verify.report import Report, build, pairs, plots, read, write
from verify.report.campaign_schema import MutationReport
from verify.report.json_file import dumps, parse
from verify.report.kept import with_kept
from verify.report.pages import disagreements
from verify.report.publishing import publish
from verify.report.schema import ReportError

DAYS = {"first": "20260901T000000Z", "second": "20260903T000000Z"}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing about what is kept."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


def campaign(name: str, wanted: Callable[[str], bool], cases: int = 24) -> Report:
    """A run of some of the fake campaign's variants."""
    whole = evidence(cases)
    runs = tuple(dataclasses.replace(run, run=name, started=DAYS[name]) for run in whole.runs)
    some: Evidence = dataclasses.replace(
        whole,
        runs=runs,
        variants=tuple(e for e in whole.variants if wanted(e.ref)),
        verdicts=tuple(v for v in whole.verdicts if wanted(v.variant)),
        builds=tuple(b for b in whole.builds if wanted(b.variant)),
        drawn=tuple(d for d in whole.drawn if wanted(d.variant)),
        lost=tuple(b for b in whole.lost if wanted(b.variant)),
        not_run=tuple(n for n in whole.not_run if wanted(n.variant)),
    )
    return build(some, BINS)


@pytest.fixture(scope="module")
def old() -> Report:
    return campaign("first", lambda ref: True)


@pytest.fixture(scope="module")
def new() -> Report:
    return campaign("second", lambda ref: ref == "torch-flash", cases=12)


A, B, C = (("mask", "causal"), ("mask", "full"), ("mask", "window"))
X, Y = (("rows", "0"), ("rows", "1"))


def test_pairs_that_met_in_either_report_have_met() -> None:
    """A level that one of them lacks has met nothing there."""
    older, newer = pairs.report({(A, X), (B, Y)}), pairs.report({(B, X), (C, Y), (B, Y)})
    assert older["never"] == ["mask causal with rows 1", "mask full with rows 0"]
    assert newer["never"] == ["mask window with rows 0"]
    whole = pairs.joined(older, newer)
    assert whole == pairs.report({(A, X), (B, Y), (B, X), (C, Y)})
    assert whole["never"] == ["mask causal with rows 1", "mask window with rows 0"]


def test_pairs_of_a_report_without_its_levels() -> None:
    """It is of an earlier day, and had all levels of the other one and those that it names."""
    older, newer = pairs.report({(A, X), (B, Y), (C, X)}), pairs.report({(B, X), (B, Y)})
    del older["levels"]
    whole = pairs.joined(older, newer)
    assert whole["never"] == ["mask causal with rows 1", "mask window with rows 1"]
    assert whole["met"] == 4


def test_scores_of_mutants_are_kept(old: Report, new: Report) -> None:
    other = next(v["ref"] for v in old["variants"] if v["ref"] != "torch-flash")
    before: Report = {**old, "mutation": [score(other), score("torch-flash")]}
    now: Report = {**new, "mutation": [score("torch-flash", killed=3)]}
    found = {one["variant"]: one["killed"] for one in with_kept(now, before)["mutation"]}
    assert found == {other: 1, "torch-flash": 3}


def score(variant: str, killed: int = 1) -> MutationReport:
    return {"variant": variant, "killed": killed, "counted": 4, "judged": 5, "chosen": 6}


def test_what_was_not_judged_is_kept_and_the_rest_is_new(old: Report, new: Report) -> None:
    whole = with_kept(new, old)
    assert [v["ref"] for v in whole["variants"]] == [v["ref"] for v in old["variants"]]
    assert len(old["variants"]) > 1
    for variant in whole["variants"]:
        source = new if variant["ref"] == "torch-flash" else old
        assert variant == of(source, variant["ref"])
    assert of(old, "torch-flash") != of(new, "torch-flash")
    for name in ("pools", "accuracy", "not_run", "lost"):
        for row in whole[name]:
            source = new if row["variant"] == "torch-flash" else old
            assert row in source[name], name
    others = [row for row in old["accuracy"] if row["variant"] != "torch-flash"]
    assert others
    assert all(row in whole["accuracy"] for row in others)
    assert whole["cases"] == sum(v["cases"] for v in whole["variants"])
    assert whole["failures"] == sum(v["failures"] for v in whole["variants"])
    assert [run["run"] for run in whole["runs"]] == ["first", "second"]
    assert (whole["run"], whole["started"]) == ("first, second", DAYS["first"])


def test_a_failure_of_a_kept_variant_keeps_the_report_red(old: Report, new: Report) -> None:
    assert old["status"] == "red"
    assert new["status"] != "red"
    assert with_kept(new, old)["status"] == "red"


def test_nothing_is_kept_of_variants_that_were_judged(old: Report, new: Report) -> None:
    assert with_kept(old, new) == old
    again = with_kept(new, with_kept(new, old))
    assert again == with_kept(new, old)


def test_devices_do_not_mix(old: Report, new: Report) -> None:
    other: Report = {**old, "device": old["device"] | {"slug": "another"}}
    with pytest.raises(ReportError, match="cannot keep what one of another says"):
        with_kept(new, other)
    other = {**old, "device": old["device"] | {"driver": "1.0"}}
    driver = old["device"]["driver"]
    whole = with_kept(new, other)
    assert whole["device"]["driver"] == f"1.0, {driver}"
    assert with_kept(new, whole)["device"] == whole["device"]  # published again: no word twice


def test_it_is_published_and_reads_as_its_pages_say(
    old: Report, new: Report, tmp_path: Path
) -> None:
    write(old, tmp_path)
    _, lost = publish(new, tmp_path, keep=True, replace=True)
    assert {line.partition(",")[0].partition(":")[0] for line in lost} <= {"torch-flash"}
    assert text(tmp_path) == dumps(with_kept(read_back(new), read_back(old)))
    assert not disagreements(read(tmp_path), tmp_path)
    assert "first, second" in (tmp_path / "report.md").read_text()
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ReportError):
        publish(new, tmp_path, keep=True, replace=True)
    first = tmp_path / "empty"
    assert publish(new, first, keep=True)[1] == []
    assert text(first) == dumps(read_back(new))


def text(folder: Path) -> str:
    return (folder / "report.json").read_text(encoding="utf-8")


def read_back(report: Report) -> Report:
    return parse(json.loads(dumps(report)))
