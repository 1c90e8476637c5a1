"""The page over all reports of a folder: what it says, who writes it, and that recheck holds it."""

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import BINS, evidence
from verify import cli
from verify.campaign import recheck
from verify.cell.discovery import Roster
from verify.evidence import Evidence
from verify.report import build, dumps, index, plots, read, write, write_index


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
    monkeypatch.setattr(recheck, "recheck_report", lambda report: (0, ()))
    monkeypatch.setattr(recheck, "roster", lambda: Roster((), ()))  # no page tells of it


def on(name: str, **versions: str) -> Evidence:
    found = evidence(6)
    run = found.runs[0]
    device = run.device | {"name": name}
    return dataclasses.replace(
        found, runs=(dataclasses.replace(run, device=device, versions=run.versions | versions),)
    )


@pytest.fixture
def reports(tmp_path):
    """reports/ with two devices, as the current directory's."""
    parent = tmp_path / "reports"
    for slug, name in (("b-gpu", "GPU | B"), ("a-cpu", "CPU A")):
        write(build(on(name, judge="0123456789ab"), BINS), parent / slug)
    return parent


def told(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, [str(word) for word in words], standalone_mode=False)
    return done.return_value, " ".join(done.output.split())


def rows(parent: Path) -> list[list[str]]:
    lines = (parent / "index.md").read_text().splitlines()
    return [re.split(r" \| ", line.strip("| ")) for line in lines if "report.json" in line]


class TestPage:
    def test_a_row_for_each_report(self, reports):
        assert write_index(reports) == reports / "index.md"
        first, second = rows(reports)
        known = read(reports / "a-cpu")
        assert first[:4] == ["CPU A", "2025-01-01", "`0123456789ab`", str(known["cases"])]
        assert first[4] == "7 variants: 1 failing, 4 passing, 1 incomplete, 1 not run"
        assert re.fullmatch(r"❌ \*\*FAIL\*\*, 0 known failures, [1-9]\d* new", first[5])
        assert "[report.md](a-cpu/report.md)" in first[6]
        assert second[0] == "GPU &#124; B"
        assert "[report.html](b-gpu/report.html)" in second[6]
        for link in re.findall(r"\]\(([^)]*)\)", (reports / "index.md").read_text()):
            assert (reports / link).is_file()

    def test_several_days_are_a_span(self, reports):
        found = read(reports / "a-cpu")
        ran = [
            {"run": day, "started": f"202501{day}T000000Z", "profile": "ci"} for day in ("01", "09")
        ]
        (reports / "a-cpu" / "report.json").write_text(dumps(found | {"runs": ran}))
        write_index(reports)
        assert rows(reports)[0][1] == "2025-01-01 to 2025-01-09"

    def test_a_report_that_does_not_read_is_listed(self, reports):
        (reports / "a-cpu" / "report.json").write_text('{"schema": 1}')
        write_index(reports)
        broken, whole = rows(reports)
        assert broken[0] == "a-cpu"
        assert "has schema version 1" in broken[5]
        assert whole[0] == "GPU &#124; B"

    def test_a_page_of_somebody_else_stays(self, reports):
        (reports / "index.md").write_text("# My kernels\n")
        assert write_index(reports) is None
        assert (reports / "index.md").read_text() == "# My kernels\n"
        assert index.disagreements(reports) == []


class TestCommands:
    def test_render_writes_it_where_reports_are_published(self, reports, monkeypatch):
        monkeypatch.chdir(reports.parent)
        told("report", "--render", "reports/a-cpu")
        assert len(rows(reports)) == 2

    def test_render_elsewhere_writes_it_only_where_there_is_one(self, reports):
        told("report", "--render", reports / "a-cpu")
        assert not (reports / "index.md").exists()
        (reports / "index.md").write_text("# Reports\n")
        told("report", "--render", reports / "a-cpu")
        assert len(rows(reports)) == 2

    def test_publish_writes_it(self, reports, monkeypatch):
        from verify.cli.report import _Place

        made = reports.parent / "made" / "c-gpu"
        write(build(on("GPU C"), BINS), made)
        assert _Place(reports, publish=True, replace=False, keep=False).published(made, 0) == 0
        assert [row[0] for row in rows(reports)] == ["CPU A", "GPU &#124; B", "GPU C"]

    def test_recheck_holds_it(self, reports):
        assert told("recheck", reports)[0] == 0  # a page that is not there contradicts nothing
        write_index(reports)
        assert told("recheck", reports)[0] == 0
        page = (reports / "index.md").read_text()
        (reports / "index.md").write_text(page.replace("CPU A", "CPU Z"))
        status, said = told("recheck", reports)
        assert status == 1
        assert "index.md, line" in said
        assert "CPU Z" in said
        assert "verify report --render" in said
        assert told("recheck", reports / "a-cpu")[0] == 0  # one report, and no index over it

    def test_recheck_misses_a_report_that_it_does_not_list(self, reports):
        write_index(reports)
        write(build(on("GPU C"), BINS), reports / "c-gpu")
        assert told("recheck", reports)[0] == 1
