"""A sanitizer's account beside a report: what of it keeps the report from green."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from tests.harness.reports_beside import FAILED, account, green_report, section, written
from verify.report import Report, plots, read
from verify.report.beside import Beside, joined


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing about what lies beside a report."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


@pytest.fixture(scope="module")
def green() -> Report:
    return green_report()


def test_clean(green: Report, tmp_path: Path) -> None:
    part = section(written(green, tmp_path, None, account()), "sanitizers", "builds")
    assert read(tmp_path)["status"] == "green"
    assert "0 records in 2 cases under memcheck and racecheck; 1 of 1 planted fault caught." in part
    # of another source, which shows
    assert "<td class=good>clean" not in part.split("Planted faults")[0]
    assert "of another source than this report" in part
    assert "<td class=good>caught" in part
    assert "a library&#x27;s kernel" in part


def test_the_same_source_is_clean(green: Report, tmp_path: Path) -> None:
    same = account()
    same["tried"][0]["source_hash"] = green["variants"][0]["source_hash"]
    part = section(written(green, tmp_path, None, same), "sanitizers", "builds")
    assert "<td class=good>clean" in part.split("Planted faults")[0]
    assert not re.search(r'class="?bad', part)


@pytest.mark.parametrize(
    ("outcome", "status"), [("faulty", "red"), ("failed", "red"), ("inconclusive", "grey")]
)
def test_a_kernel_that_is_not_clean(
    outcome: str, status: str, green: Report, tmp_path: Path
) -> None:
    bad = account()
    bad["tried"][0]["cases"]["case one"] = outcome
    bad["tried"][0]["processes"][0]["total"] = 3
    bad["failures"] = [FAILED | {"outcome": outcome}]
    part = section(written(green, tmp_path, None, bad), "sanitizers", "builds")
    assert read(tmp_path)["status"] == status
    assert "3 records in 2 cases" in part
    assert f'<span class="bad">{outcome}</span> memcheck: Precise: a write; kernel flash' in part
    assert "<pre>verify sanitize</pre>" in part
    assert f"1 of 2 {outcome}" in part


def test_a_tool_that_misses_its_fault_is_no_evidence(green: Report, tmp_path: Path) -> None:
    missed = copy.deepcopy(account())
    missed["planted"][1] |= {"holds": False, "outcome": "clean"}
    part = section(written(green, tmp_path, None, missed), "sanitizers", "builds")
    assert read(tmp_path)["status"] == "grey"
    assert "0 of 1 planted fault caught. Not as wanted: memcheck on planted-overrun." in part
    assert "<td class=bad>not seen, wanted caught" in part


def test_a_copy_that_nothing_caught_is_no_evidence(green: Report, tmp_path: Path) -> None:
    missed = copy.deepcopy(account())
    spare = missed["planted"][1] | {"wanted": "any", "outcome": "clean", "spare": True}
    missed["planted"].append(spare | {"variant": "planted-copy", "copy_of": "torch-flash"})
    part = section(written(green, tmp_path, None, missed), "sanitizers", "builds")
    assert read(tmp_path)["status"] == "grey"
    assert "Not as wanted: planted-copy, which nothing caught." in part
    assert "<td class=bad>nothing" in part


def test_nothing_tried_is_not_green(green: Report) -> None:
    empty = joined(green, Beside(sanitizer=account(tried=[])))  # type: ignore[arg-type]
    assert empty["status"] == "grey"
