"""bench.json beside a report: a section with its numbers, a status for values that differ, and no
trace where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_bench import failed, record, row
from tests.harness.fake_campaign import BINS, DEVICE, evidence
from tests.meta.report.test_report_rendering import HOSTILE, Elements
from verify.campaign.recheck import recheck
from verify.cell.discovery import Roster
from verify.report import Report, build, plots, read, reports_in, write
from verify.timing import page
from verify.timing.record import Benchmark
from verify.timing.record import write as write_bench


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing about speed."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


@pytest.fixture(scope="module")
def green() -> Report:
    found = evidence(24)
    kept = {
        "variants": tuple(e for e in found.variants if e.ref == "torch-flash"),
        "verdicts": tuple(v for v in found.verdicts if v.variant == "torch-flash"),
    }
    return build(dataclasses.replace(found, **kept, lost=(), not_run=(), builds=()), BINS)


def written(report: Report, folder: Path, bench: Benchmark | None) -> str:
    if bench is not None:
        write_bench(bench, folder, page.markdown(bench))
    return write(report, folder)[2].read_text(encoding="utf-8")


def speed(found: str) -> str:
    begin = found.index('<h2 id="speed">')
    return found[begin : found.index("<h2", begin + 4)]


def test_the_section_shows_the_numbers(green: Report, tmp_path: Path) -> None:
    source = green["variants"][0]["source_hash"]
    bench = record(row("torch-flash", 0.5e-3, source_hash=source), row("ptx"), failed("cute"))
    part = speed(written(green, tmp_path, bench))
    assert read(tmp_path)["status"] == "green"
    for said in (
        *("forward, full: batch 1, 8 heads", "275", "137", "N = 8192", "head dim 64"),
        *("2 rows of 2 variants timed.", "Not timed on some workload: cute.", "crash: killed by"),
        *("32 warm-ups and 128 timed calls", "L2 flushed", "SM clock 1980 MHz", "no NVRTC"),
        *("700 TFLOP/s", "not judged: no passing verdict", "<svg", "4 B H Sq Skv D"),
    ):
        assert said in part, said
    assert "another source" not in part
    lines = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Speed" in lines
    assert "275" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_without_a_record_nothing_changes(green: Report, tmp_path: Path) -> None:
    """Reports of an earlier day, and their pages, stay as they are."""
    assert 'id="speed"' not in written(green, tmp_path, None)
    assert "beside" not in read(tmp_path)


def test_values_that_differ_are_red(green: Report, tmp_path: Path) -> None:
    wrong = row("ptx", differs="first row, column 0: 1, others 0")
    found = written(green, tmp_path, record(row("torch-flash"), wrong))
    assert read(tmp_path)["status"] == "red"
    assert "Values differ from those of the others: ptx." in found
    assert "first row, column 0: 1, others 0" in speed(found)


def test_a_source_that_has_changed_since_shows(green: Report, tmp_path: Path) -> None:
    part = speed(written(green, tmp_path, record(row("torch-flash", source_hash="old"))))
    assert "another source than this report" in part


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": DEVICE | {"slug": "elsewhere"}}, "bench.json is of another device: elsewhere"),
        ({"schema": 2}, "bench.json cannot be read"),
    ],
)
def test_an_unusable_record_is_named(
    changes: dict[str, Any], named: str, green: Report, tmp_path: Path
) -> None:
    made = record(row())
    write_bench({**made, **changes}, tmp_path, page.markdown(made))  # type: ignore[typeddict-item]
    assert named in written(green, tmp_path, None)
    assert read(tmp_path)["status"] == "grey"


def test_pages_that_contradict_the_record_are_found(
    green: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.campaign.recheck.roster", lambda: Roster((), ()))
    folder = tmp_path / DEVICE["slug"]
    written(green, folder, record(row()))
    assert not recheck(reports_in(tmp_path))[0].contradicting
    (folder / "bench.md").write_text("faster\n")
    (said,) = recheck(reports_in(tmp_path))[0].contradicting
    assert said.startswith("bench.md, line 1: ")


def test_words_of_a_kernel_do_not_act(green: Report, tmp_path: Path) -> None:
    hostile = row(HOSTILE, config=HOSTILE, build=HOSTILE, differs=HOSTILE, dtype="float16")
    left = [{"variant": HOSTILE, "config": HOSTILE, "dtype": HOSTILE, "reason": HOSTILE}]
    bench = record(hostile, failed(HOSTILE, HOSTILE), run=HOSTILE, suite=HOSTILE, left=left)
    tags = Elements(written(green, tmp_path, bench)).tags
    assert [tag for tag, _ in tags].count("script") == 1  # the page's own
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert not {"\x1b", "\u202e"} & set(text)
