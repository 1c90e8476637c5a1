"""`verify report`: the runs that it joins, what it refuses, and what it leaves alone."""

import dataclasses
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import DEVICE, evidence, of
from verify import cli
from verify.campaign import runner
from verify.evidence import Recorder, strict_json
from verify.report import (
    Report,
    build,
    read,
)
from verify.statistics import verdicts


class TestCommand:
    """verify report --run ... of evidence that is there."""

    @pytest.fixture
    def runs(self, tmp_path, monkeypatch):
        """Half of the cases each, one of them lost in the other half."""
        monkeypatch.chdir(tmp_path)
        found = evidence(8)
        for place, (name, day) in enumerate((("one", "01"), ("two", "02"))):
            run = dataclasses.replace(found.run, run=name, started=f"2025-01-{day}T00:00:00+00:00")
            other = found.verdicts[1 - place]
            with Recorder(tmp_path / ".verify" / "runs" / name, "gw0") as recorder:
                recorder.begin(other.case, "generate", other.variant)
                for item in (run, *found.variants, *found.verdicts[place::2], *found.drawn):
                    recorder.write(item)
        return tmp_path

    def told(self, *words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["report", *words], standalone_mode=False)
        if isinstance(done.exception, cli.UsageError):
            return cli.USAGE, done.exception.format_message()
        assert done.exception is None, done.output
        return done.return_value, done.output

    @pytest.mark.for_ci
    def test_two_runs_are_one_report(self, runs):
        status, said = self.told(
            "--run", "one", "--run", str(runs / ".verify" / "runs" / "two"), "--out", "pages"
        )
        built = read(runs / "pages" / DEVICE["slug"])
        whole = build(dataclasses.replace(evidence(8), lost=(), builds=(), not_run=()))
        assert built["failures"] > 0
        assert (status, built["run"]) == (runner.FAILED, "one, two")
        assert "one" in said
        assert (built["cases"], built["failures"], built["lost"]) == (
            whole["cases"],
            whole["failures"],
            [],
        )
        grown = [
            {"group": g["group"], "drawn": 2 * g["drawn"], "refused": 2 * g["refused"]}
            for g in _groups(whole)
        ]
        assert _groups(built) == grown
        assert [_without_draws(v) for v in built["variants"]] == [
            _without_draws(v) for v in whole["variants"]
        ]

    def test_what_does_not_belong_together_is_refused(self, runs):
        folder = runs / ".verify" / "runs"
        device = DEVICE | {"slug": "cpu"}
        run = dataclasses.replace(evidence().run, run="abroad", device=device)
        with Recorder(folder / "abroad", "gw0") as recorder:
            for item in (run, evidence(8).variants[0], evidence(8).verdicts[0]):
                recorder.write(item)
        # not all was judged
        assert self.told("--run", "abroad", "--out", "alone")[0] == runner.INFRASTRUCTURE
        status, said = self.told("--run", "one", "--run", "abroad", "--out", "pages")
        assert status == runner.USAGE
        assert "mixes devices: cpu, nvidia" in said
        assert not (runs / "pages").exists()

    def test_only_the_newest_source_of_a_variant_is_judged(self, runs):
        """And the report names the runs whose evidence does not count."""
        failing = next(v for v in evidence(8).verdicts if v.outcome == "fail" and v.counted)
        (entry,) = (entry for entry in evidence(8).variants if entry.ref == failing.variant)
        passed = dataclasses.replace(
            failing, case="mended", outcome="pass", finding=None, measures={}
        )
        run = dataclasses.replace(evidence().run, run="mended", started="2025-01-03T00:00:00")
        with Recorder(runs / ".verify" / "runs" / "mended", "gw0") as recorder:
            for item in (run, dataclasses.replace(entry, source_hash="mended"), passed):
                recorder.write(item)
        words = (word for name in ("one", "two", "mended") for word in ("--run", name))
        status, said = self.told(*words, "--out", "pages")
        folder = runs / "pages" / DEVICE["slug"]
        built = read(folder)
        mended = of(built, entry.ref)
        assert (mended["source_hash"], mended["cases"], mended["failures"]) == ("mended", 1, 0)
        assert mended["failing"] == []
        assert [(one["variant"], one["run"]) for one in built["left_out"]] == [
            (entry.ref, "one"),
            (entry.ref, "two"),
        ]
        assert sum(one["failures"] for one in built["left_out"]) > 0
        assert f"left out: {entry.ref} of run one" in said
        page = (folder / "report.md").read_text(encoding="utf-8")
        assert "Older sources" in page
        whole = {v["ref"]: v["cases"] for v in build(evidence(8))["variants"]}
        others = {v["ref"]: v["cases"] for v in built["variants"]}
        assert {ref: n for ref, n in others.items() if n != whole[ref]} == {entry.ref: 1}
        assert status == runner.INFRASTRUCTURE, "nothing fails, and not all was judged"

    def test_what_cannot_be_reported_is_refused(self, runs):
        with Recorder(runs / "empty", "gw0") as recorder:
            recorder.write(evidence().run)
        for name, message in (
            ("three", "no run 'three' under"),
            ("empty", "nothing was judged in empty"),
        ):
            status, said = self.told("--run", name, "--out", "pages")
            assert status == runner.USAGE
            assert message in said
        assert not (runs / "pages").exists()

    @pytest.mark.for_ci
    def test_evidence_from_elsewhere_leaves_nothing_here(self, runs, monkeypatch):
        (runs / "here").mkdir()
        monkeypatch.chdir(runs / "here")
        self.told("--run", str(runs / ".verify" / "runs" / "one"), "--out", str(runs / "pages"))
        assert (runs / "pages" / DEVICE["slug"] / "report.html").is_file()
        assert list((runs / "here").iterdir()) == []

    def test_the_whole_is_judged_and_the_evidence_left_alone(self, runs, monkeypatch):
        failed = dataclasses.replace(
            evidence().verdicts[0],
            case="whole",
            oracle="statistics",
            group="campaign",
            outcome="fail",
            problem="-",
        )
        counts = []
        monkeypatch.setattr(
            verdicts, "findings", lambda found: counts.append(len(found)) or [failed]
        )
        before = {path: path.read_bytes() for path in (runs / ".verify" / "runs").glob("*/*")}
        assert self.told("--run", "one", "--run", "two", "--out", "pages")[0] == runner.FAILED
        assert counts == [len(evidence(8).verdicts)]
        failing = [
            f["oracle"]
            for f in of(read(runs / "pages" / DEVICE["slug"]), failed.variant)["failing"]
        ]
        assert "statistics" in failing
        assert {
            path: path.read_bytes() for path in (runs / ".verify" / "runs").glob("*/*")
        } == before


def _groups(report: Report) -> list[Any]:
    return [group for v in report["variants"] for d in v["dtypes"] for group in d["groups"]]


def _without_draws(variant: Any) -> Any:
    dtypes = [
        {key: d[key] for key in d if key not in ("drawn", "refused", "groups")}
        for d in variant["dtypes"]
    ]
    return strict_json.dumps({**variant, "dtypes": dtypes})
