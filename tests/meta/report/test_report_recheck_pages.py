"""What pages and the command line show of worst cases computed again."""

import dataclasses
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import BINS, evidence
from tests.meta.probes.test_probes_report import REPORT
from tests.meta.report.test_report_beside import account
from verify import cli
from verify.campaign import recheck
from verify.evidence.strict_json import loads
from verify.probes.report import as_data
from verify.report import (
    build,
    dumps,
    parse,
    plots,
    read,
    svg,
    write,
)
from verify.report.pages import disagreements


@pytest.fixture(scope="module")
def green():
    """A report in which nothing is wrong, and its plot, which takes most of the time."""
    found = evidence(24)
    mine = {"variants": tuple(e for e in found.variants if e.ref == "torch-flash")}
    mine |= {"verdicts": tuple(v for v in found.verdicts if v.variant == "torch-flash")}
    known = build(dataclasses.replace(found, **mine, lost=(), not_run=(), builds=()), BINS)
    return known, plots.ratio_plot(known)


class TestPages:
    """Files of a report's folder that contradict each other."""

    @pytest.fixture
    def folder(self, green, tmp_path, monkeypatch):
        """The folder of that report."""
        known, picture = green
        monkeypatch.setattr(plots, "ratio_plot", lambda report: picture)
        monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
        write(known, tmp_path)
        assert disagreements(read(tmp_path), tmp_path) == []
        return tmp_path

    def test_a_plot_is_known_by_its_data(self, green):
        known, picture = green
        again = plots.ratio_plot(parse(loads(dumps(known))))
        assert svg.without_pictures(picture) == svg.without_pictures(again)
        worse = plots.ratio_plot(build(evidence(24, worse=1.5), BINS))
        assert svg.without_pictures(picture) != svg.without_pictures(worse)
        assert "<path" not in svg.without_pictures(picture)

    def test_what_came_to_lie_beside_it_is_missed(self, folder):
        (folder / "sanitizer.json").write_text(json.dumps(account()))
        said = disagreements(read(folder), folder)
        assert said[0].startswith(
            "report.json: says nothing of sanitizer.json, but the file beside it makes green, '0"
            " records"
        )
        assert [line.split(",")[0] for line in said[1:]] == ["report.md", "report.html"]
        assert "make '✅ **pass** Sanitizers: 0 records" in said[1]
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []

    def test_the_pages_of_what_lies_beside_it_are_held_too(self, folder):
        (folder / "sanitizer.json").write_text(json.dumps(account()))
        probes = replace(REPORT, device=read(folder)["device"])
        (folder / "probes.json").write_text(json.dumps(as_data(probes)))
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []
        for name, old in (("probes.md", "agrees"), ("sanitizer.md", "2025.3")):
            page = (folder / name).read_text()
            assert old in page
            (folder / name).write_text(page.replace(old, "as you like"))
        said = disagreements(read(folder), folder)
        assert [line.split(",")[0] for line in said] == ["probes.md", "sanitizer.md"]
        (folder / "probes.md").unlink()
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []

    @pytest.mark.parametrize("name", ["report.md", "report.html", "r.svg"])
    def test_a_page_that_was_changed(self, folder, name):
        page = (folder / name).read_text()
        (folder / name).write_text(page.replace("torch-flash", "torch-flush", 1))
        (said,) = disagreements(read(folder), folder)
        assert said.startswith(f"{name}, line ")
        assert "torch-flush" in said or "svg" in said
        (folder / name).unlink()
        assert disagreements(read(folder), folder) == []

    def test_numbers_that_were_changed(self, folder):
        known = read(folder)
        known["variants"][0]["dtypes"][0]["cases"] += 1
        (folder / "report.json").write_text(dumps(known))
        said = disagreements(read(folder), folder)
        assert said[0].startswith("report.json: torch-flash: ")
        assert {line.split(",")[0] for line in said[1:]} == {"report.md", "report.html"}

    def test_a_status_that_hides_a_failure(self, folder):
        known = read(folder)
        known["variants"][0]["dtypes"][0]["tensors"]["out"]["worst"]["r"] = 4.8e4
        (folder / "report.json").write_text(dumps(known))
        assert (
            "torch-flash, float16 is green, but the worst r of out is 48,000"
            in disagreements(read(folder), folder)[0]
        )

    def test_how_a_machine_draws_does_not_count(self, folder):
        page = (folder / "r.svg").read_text()
        body = re.search(r"<svg [^>]*>(.*)</svg>", page, re.DOTALL)[1]
        other = body.replace("\n", "\n ", 1)
        (folder / "r.svg").write_text(page.replace(body, other))
        assert disagreements(read(folder), folder)  # changed since it was drawn
        (folder / "r.svg").write_text(
            page.replace(body, other).replace(svg._digest(body), svg._digest(other))
        )
        assert disagreements(read(folder), folder) == []

    def test_colours_do_not_count(self, folder):
        page = (folder / "report.html").read_text()
        (folder / "report.html").write_text(page.replace("--warn: ", "--other: "))
        assert disagreements(read(folder), folder) == []

    def test_the_command_says_so(self, folder, monkeypatch):
        monkeypatch.setattr(recheck, "roster", lambda: type("Nobody", (), {"declarations": ()}))
        monkeypatch.setattr(recheck, "recheck_report", lambda report: (0, ()))
        assert (
            CliRunner()
            .invoke(cli.app, ["recheck", str(folder)], standalone_mode=False)
            .return_value
            == 0
        )
        (folder / "report.md").write_text("# All is well\n")
        done = CliRunner().invoke(cli.app, ["recheck", str(folder)], standalone_mode=False)
        assert done.return_value == 1
        assert "report.md, line 1: has '# All is well'" in done.output
        assert "verify report --render" in done.output
