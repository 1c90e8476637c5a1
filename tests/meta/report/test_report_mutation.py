"""Mutation scores in a report: of kernels with the mutated source alone, and kept as they were."""

from __future__ import annotations

from json import loads
from pathlib import Path

import pytest

from tests.harness.fake_campaign import BINS, evidence
from tests.harness.rendered import as_markdown
from verify.report import Report, build, dumps, mutation, parse
from verify.report.pages import disagreements, render


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report of two variants, of which one has the source that was mutated."""
    first, second = (v["ref"] for v in build(evidence(0), BINS)["variants"][:2])
    sources = {v["ref"]: v["source_hash"] for v in build(evidence(0), BINS)["variants"]}
    scores = {first: (sources[first], (7, 8, 11, 40)), second: ("another", (1, 2, 2, 2))}
    monkeypatch.setattr(mutation, "SCORES", scores)
    return build(evidence(0), BINS)


def test_only_a_kernel_with_the_mutated_source_has_a_score(report: Report) -> None:
    first = report["variants"][0]["ref"]
    assert report["mutation"] == [
        {"variant": first, "killed": 7, "counted": 8, "judged": 11, "chosen": 40}
    ]
    page = as_markdown(report)
    assert f"| **{first}** | 87.5 % | 7 / 8 | 11 | 40 |" in page


def test_without_a_score_there_is_no_section(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "SCORES", {})
    assert "Mutation score" not in as_markdown(build(evidence(0), BINS))


def test_a_report_of_an_earlier_day_gets_scores_once(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = parse(
        {name: value for name, value in loads(dumps(report)).items() if name != "mutation"}
    )
    assert "mutation" not in earlier
    written = parse(loads(render(earlier, tmp_path)["report.json"]))
    assert written["mutation"] == report["mutation"]
    assert dumps(written) == dumps(report)
    # later scores are of a later campaign
    monkeypatch.setattr(mutation, "SCORES", {})
    assert mutation.scored(written) == written
    assert disagreements(written, tmp_path) == []
