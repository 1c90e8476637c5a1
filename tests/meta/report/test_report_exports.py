"""Reports for other programs: JUnit XML, SARIF, annotations and the short summary."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.fake_campaign import BINS, evidence, of
from verify.cli.files import Files
from verify.cli.options import UsageError
from verify.report import Report, build, exports


@pytest.fixture
def report() -> Report:
    return build(evidence(), BINS)


def cases(text: str) -> dict[tuple[str, str], ElementTree.Element]:
    return {(c.get("classname", ""), c.get("name", "")): c for c in ElementTree.fromstring(text)}


def test_junit_has_a_case_for_every_oracle_and_fails_where_one_convicts(report: Report) -> None:
    text = exports.junit(report)
    found = cases(text)
    judged = {
        (f"{v['ref']}.{d['dtype']}", f"{o['group']}: {o['oracle']}")
        for v in report["variants"]
        for d in v["dtypes"]
        for o in d["oracles"]
        if o["cases"]
    }
    assert judged
    assert judged <= set(found)
    failing = {key for key, case in found.items() if case.find("failure") is not None}
    wrong = of(report, "triton-tutorial")
    assert failing == {
        (f"triton-tutorial.{f['dtype']}", f"bound: {f['oracle']}") for f in wrong["failing"]
    }
    assert failing
    (case,) = (found[key] for key in failing)
    said = case.find("failure")
    assert said is not None
    assert said.get("message") == wrong["failing"][0]["message"]
    assert wrong["failing"][0]["replay"] in (said.text or "")
    suite = ElementTree.fromstring(text)
    assert (suite.get("failures"), suite.get("tests")) == ("1", str(len(found)))


def test_a_known_defect_is_skipped_suppressed_and_not_annotated(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert len(exports.github(report)) == 1
    for failure in of(report, "triton-tutorial")["failing"]:
        failure["known"] = "told elsewhere"
    found = cases(exports.junit(report)).values()
    assert not any(case.find("failure") is not None for case in found)
    assert any(
        (skipped := case.find("skipped")) is not None
        and skipped.get("message") == "known: told elsewhere"
        for case in found
    )
    (result,) = exports.sarif(report)["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "told elsewhere"}]
    assert exports.github(report) == []


def test_a_failure_that_no_counted_case_shows_has_a_case_of_its_own(report: Report) -> None:
    wrong = of(report, "triton-tutorial")
    (failure,) = wrong["failing"]
    failure["oracle"] = "campaign"
    for dtype in wrong["dtypes"]:
        for oracle in dtype["oracles"]:
            oracle["failures"] = 0
    case = cases(exports.junit(report))[f"triton-tutorial.{failure['dtype']}", "campaign"]
    assert case.find("failure") is not None


def test_sarif_names_the_kernels_file_and_the_command(report: Report) -> None:
    log = json.loads(json.dumps(exports.sarif(report), allow_nan=False))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (result,) = run["results"]
    (failure,) = of(report, "triton-tutorial")["failing"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    (location,) = result["locations"]
    path = of(report, "triton-tutorial")["path"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == path
    assert failure["replay"] in result["message"]["text"]


def test_annotations_are_one_line_each_and_for_github_alone(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert exports.github(report) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    of(report, "triton-tutorial")["failing"][0]["message"] = "100 %\n::error::forged"
    (line,) = exports.github(report)
    assert re.fullmatch(r"::error file=[^:,]+,line=1,title=[^:,]+::100 %25 [^\n]*%0A[^\n]+", line)


def test_the_summary_is_short_and_keeps_the_verdicts(report: Report) -> None:
    many = dataclasses.replace(
        evidence(),
        variants=tuple(
            dataclasses.replace(entry, ref=f"{entry.ref}-{n}")
            for entry in evidence().variants
            for n in range(120)
        ),
    )
    for one in (report, build(many, BINS)):
        text = exports.summary(one)
        assert len(text.encode()) < exports.SUMMARY_LIMIT
        assert "## Verdicts" in text


def test_files_are_written_and_a_summary_is_appended(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    files = Files(tmp_path / "verdicts.xml", tmp_path / "verdicts.sarif", page)
    files.write(report)
    assert (tmp_path / "verdicts.xml").read_text() == exports.junit(report)
    assert json.loads((tmp_path / "verdicts.sarif").read_text()) == exports.sarif(report)
    assert page.read_text() == "before\n" + exports.summary(report)
    with pytest.raises(UsageError, match="nowhere"):
        Files(tmp_path / "nowhere" / "verdicts.xml").write(report)


def test_each_kind_of_device_has_files_of_its_own_but_one_summary() -> None:
    given = Files(Path("out/verdicts.xml"), None, Path("page.md")).of("an-l4")
    assert given == Files(Path("out/verdicts.an-l4.xml"), None, Path("page.md"))


def test_without_a_report_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Files(tmp_path / "verdicts.xml").write(None)
    assert "--junit: nothing written" in capsys.readouterr().out
    assert not (tmp_path / "verdicts.xml").exists()
