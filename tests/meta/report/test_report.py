"""Reports: built from evidence, written, read back."""

import dataclasses
import json
import math
import re
import sys

import pytest

from tests.harness.fake_campaign import BINS, DEVICE, entry, evidence, of, verdict
from tests.harness.rendered import as_markdown
from verify import cli
from verify.campaign import runner
from verify.cell.discovery import Roster
from verify.document.text import intervals
from verify.evidence import Evidence, NotRun, Recorder, load, strict_json
from verify.report import (
    Report,
    ReportError,
    build,
    dumps,
    parse,
    plots,
    read,
    replays,
    statistics,
    write,
)
from verify.report.beside import Beside
from verify.report.sections import tightness as tight


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class TestBuild:
    def test_statuses(self, report):
        found = {v["ref"]: v["status"] for v in report["variants"]}
        assert found == {
            "torch-flash": "green",
            "triton-fwd": "green",
            "triton-tutorial": "red",
            "ptx-mma": "grey",
            "gluon-hopper": "grey",
            "triton-backward": "green",
            "triton-fp8-forward": "green",
        }
        assert report["status"] == "red"

    def test_reasons_name_what_is_missing(self, report):
        assert of(report, "ptx-mma")["reasons"] == [
            "float16: 6 of 8 coverage bins empty",
            "1 case launched but never judged",
        ]
        assert of(report, "gluon-hopper")["reasons"] == [
            "unavailable: needs compute capability 9.0"
        ]
        assert of(report, "ptx-mma")["dtypes"][0]["bins_missing"] == sorted(BINS[2:])
        assert report["reasons"] == ["cute-fa3 not run: nvidia-cutlass is not installed"]

    def test_a_dtype_that_was_not_run_keeps_a_variant_from_green(self):
        found = evidence()
        entries = tuple(
            dataclasses.replace(
                e, support=e.support | {"dtypes": [*e.support["dtypes"], "float32"]}
            )
            for e in found.variants
        )
        report = build(
            dataclasses.replace(
                found,
                variants=entries,
                not_run=(NotRun(variant="torch-flash", dtype="float32", reason="left out"),),
            ),
            BINS,
        )
        assert (of(report, "torch-flash")["status"], of(report, "torch-flash")["reasons"]) == (
            "grey",
            ["float32: left out"],
        )
        assert of(report, "triton-fwd")["reasons"] == ["float32: not run"]

    def test_shrinking_counts_in_no_statistic_but_shows_the_smallest_failure(self, report):
        bfloat16 = of(report, "triton-tutorial")["dtypes"][1]
        assert (bfloat16["cases"], bfloat16["failures"]) == (61, 1)
        (failure,) = of(report, "triton-tutorial")["failing"]
        assert (failure["phase"], failure["cases"]) == ("shrink", 2)
        assert "sq=15,skv=2" in failure["problem"]

    def test_a_failure_found_only_while_shrinking_is_red(self):
        found = evidence()
        kept = tuple(v for v in found.verdicts if v.outcome == "pass" or v.phase == "shrink")
        variant = of(build(dataclasses.replace(found, verdicts=kept), BINS), "triton-tutorial")
        assert (variant["status"], variant["reasons"]) == (
            "red",
            ["bfloat16: 1 case failed while shrinking", "sm_100a: 1 of 2 builds fail"],
        )

    def test_worst_case_is_replayable(self, report):
        worst = of(report, "triton-tutorial")["dtypes"][1]["tensors"]["out"]["worst"]
        assert (worst["tensor"], worst["r"]) == ("out", 7.1)
        assert replays.command(worst) == f"python -m verify replay {worst['case']}"

    def test_the_worst_lse_is_the_nan(self, report):
        worst = of(report, "triton-tutorial")["dtypes"][1]["tensors"]["lse"]["worst"]
        assert math.isnan(worst["r"])

    def test_bins_by_variant(self):
        report = build(
            evidence(), lambda entry, dtype: BINS[:2] if entry.ref == "ptx-mma" else BINS
        )
        assert of(report, "ptx-mma")["dtypes"][0]["status"] == "green"

    def test_evidence_of_two_devices(self):
        found = evidence()
        other = dataclasses.replace(found.runs[0], device=DEVICE | {"slug": "cpu-x86_64"})
        with pytest.raises(ReportError, match="mixes devices: cpu-x86_64, nvidia-h100-80gb-hbm3"):
            build(dataclasses.replace(found, runs=(*found.runs, other)), BINS)
        with pytest.raises(ReportError, match="no run record"):
            build(Evidence(), BINS)

    def test_several_sources_of_one_variant(self):
        found = dataclasses.replace(evidence(), changed=("torch-flash", "triton-fwd"))
        with pytest.raises(
            ReportError,
            match="more than one source of torch-flash, triton-fwd: report those runs apart",
        ):
            build(found, BINS)

    def test_a_missing_declaration_is_not_green(self):
        found = evidence()
        found = dataclasses.replace(
            found, variants=tuple(e for e in found.variants if e.ref != "triton-fwd")
        )
        assert of(build(found, BINS), "triton-fwd")["status"] == "grey"

    def test_a_case_counts_once_in_a_bin(self):
        one = verdict("torch-flash", "float16", 4, bins=("gqa", "ragged_tail"))
        found = [
            one,
            dataclasses.replace(one, oracle="repeat", bins=("gqa", "rescale")),
            dataclasses.replace(one, case="b"),
        ]
        (dtype, *_) = of(
            build(dataclasses.replace(evidence(), verdicts=tuple(found)), BINS), "torch-flash"
        )["dtypes"]
        assert dtype["bins"] == {"gqa": 2, "ragged_tail": 2, "rescale": 1}

    def test_the_last_reading_of_a_cases_clock_counts(self):
        one = verdict("torch-flash", "float16", 4)
        found = [
            dataclasses.replace(one, oracle=str(i), seconds={"run": run})
            for i, run in enumerate((1.0, 4.0, 2.0))
        ]
        found.append(dataclasses.replace(one, case="other", seconds={"run": 8.0}))
        assert statistics.timings(found) == {"run": {"median": 4.0, "maximum": 8.0, "total": 12.0}}

    def test_no_absolute_path_gets_in(self):
        found = dataclasses.replace(
            evidence(), variants=(entry("mine", path="/home/someone/mine.py"),)
        )
        assert of(build(found, BINS), "mine")["path"] == "mine.py"


class TestStatistics:
    def test_quantiles_are_members(self):
        found = statistics.distribution([float(i) for i in range(1, 101)], statistics.EDGES_ULP)
        assert (
            found["minimum"],
            found["median"],
            found["p90"],
            found["p99"],
            found["maximum"],
        ) == (1, 50, 90, 99, 100)

    def test_histogram_adds_up_and_puts_edges_below(self):
        found = statistics.distribution(
            [0.0, 0.5, 1.0, 1.5, math.inf, math.nan], statistics.EDGES_R
        )
        counts = dict(zip(statistics.EDGES_R[1:], found["histogram"], strict=True))
        assert (counts[2**-10], counts[0.5], counts[1.0], counts[2.0], counts[math.inf]) == (
            1,
            1,
            1,
            1,
            2,
        )
        assert (sum(found["histogram"]), found["not_finite"]) == (6, 2)

    def test_samples_are_bounded_and_keep_the_worst(self):
        verdicts = [verdict("triton-fwd", "float16", i) for i in range(0, 3000, 3)]
        found = statistics.samples(verdicts)
        assert list(found) == ["out"]
        assert len(found["out"]) <= statistics.MAX_SAMPLES
        worst = max(v.measures["r_out"] for v in verdicts)
        assert max(s["r"] for s in found["out"]) == pytest.approx(worst, rel=5e-5)

    def test_intervals(self):
        assert intervals([*range(16, 257)]) == "16-256"
        assert intervals([8, 16, 24, 64]) == "8-24 by 8, 64"
        assert intervals([64, 128]) == "64, 128"
        assert intervals([]) == ""


class TestFiles:
    @pytest.mark.for_ci
    def test_round_trip_and_bytes(self, report, tmp_path):
        first = write(report, tmp_path / "a")
        second = write(build(evidence(), BINS), tmp_path / "b")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        assert dumps(read(tmp_path / "a")) == first[0].read_text(encoding="utf-8")
        assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
            "r.svg",
            "report.html",
            "report.json",
            "report.md",
        ]

    @pytest.mark.for_ci
    def test_a_plot_is_drawn_once(self, report, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            plots, "ratio_plot", lambda report: drawn.append(1) or '<svg style="x"></svg>'
        )
        page = write(report, tmp_path)[2].read_text(encoding="utf-8")
        assert len(drawn) == 1
        assert '<svg style="x"></svg>' in page

    def test_json_is_strict(self, report):
        data = json.loads(dumps(report), parse_constant=pytest.fail)
        assert (
            next(v for v in data["variants"] if v["ref"] == "torch-flash")["contract"][
                "empty_row_lse"
            ]
            == "-inf"
        )
        assert of(parse(data), "torch-flash")["contract"]["empty_row_lse"] == -math.inf

    def test_from_disk(self, tmp_path):
        found = evidence(6)
        with Recorder(tmp_path, "gw0") as recorder:
            records = (
                *found.runs,
                *found.variants,
                *found.lost,
                *found.verdicts,
                *found.drawn,
                *found.not_run,
            )
            for record in (*records, *found.builds):
                recorder.write(record)
        assert dumps(build(load(tmp_path), BINS)) == dumps(build(found, BINS))

    @pytest.mark.for_ci
    def test_large_campaigns_stay_small(self, tmp_path):
        paths = write(build(evidence(900), BINS), tmp_path)
        sizes = [path.stat().st_size for path in paths]
        assert all(
            size < limit for size, limit in zip(sizes, (1_000_000, 1 << 20, 1_500_000), strict=True)
        )

    def test_markdown_has_a_limit(self, report):
        failure = of(report, "triton-tutorial")["failing"][0]
        many = [
            failure | {"config": f"c{i}", "message": "x" * 5000, "replay": "y" * 20_000}
            for i in range(300)
        ]
        swollen = report | {"variants": [v | {"failing": many} for v in report["variants"]]}
        page = as_markdown(swollen)
        assert len(page.encode()) < 1 << 20
        assert page.endswith("(cut; the rest: report.html and report.json)\n")

    def test_details_go_before_anything_is_cut(self, report, monkeypatch):
        whole = as_markdown(report)
        monkeypatch.setattr("verify.document.markdown.LIMIT", len(whole.encode()))
        page = as_markdown(report)
        assert "## Variants" not in page
        assert "## Device and sources" in page
        assert page.endswith("\nThe details are in report.html and report.json.\n")


class TestReading:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is no report"),
            ("[]", "no schema version"),
            ('{"schema": NaN}', "NaN is not JSON"),
            ('{"schema": 1}', "has schema version 1; this version of verify reads 2 and 3"),
            ('{"schema": 4}', "has schema version 4; this version of verify reads 2 and 3"),
            ('{"schema": true}', "has schema version True"),
            ('{"schema": 2}', "report.run: is missing"),
            ('{"schema": 2, "power": 1, "variants": [{"dtypes": [{"oracles": [1]}]}]}', "report"),
            ('{"schema": 3}', "report.run: is missing"),
        ],
    )
    def test_wrong_files(self, tmp_path, content, message):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(ReportError, match=re.escape(message)) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)

    def test_commands_refuse_another_version_in_one_line(self, tmp_path, monkeypatch, capsys):
        one = tmp_path / "device"
        one.mkdir()
        (one / "report.json").write_text('{"schema": 1}')
        for command in (["compare", str(one), str(one)], ["recheck", str(tmp_path)]):
            monkeypatch.setattr(sys, "argv", ["verify", *command])
            monkeypatch.setattr("verify.campaign.recheck.roster", lambda: Roster((), ()))
            assert cli.main() == runner.USAGE
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == 1
            assert "has schema version 1; this version of verify reads 2 and 3" in lines[0]

    def test_missing_file(self, tmp_path):
        with pytest.raises(ReportError, match="No such file"):
            read(tmp_path / "nothing.json")

    def test_wrong_shape_names_the_place(self, report):
        data = strict_json.encode(report)
        data["variants"][0]["dtypes"] = [{"dtype": 16}]
        with pytest.raises(
            ReportError,
            match=r"report\.variants\[0\]\.dtypes\[0\]\.dtype: Expected `str`, got `int`",
        ):
            parse(data)

    def test_unknown_fields_are_ignored(self, report):
        assert "future" not in parse(strict_json.encode(report) | {"future": 1})


class TestVersions:
    def test_a_run_that_went_on_names_all_of_them(self):
        found = evidence()
        (run,) = found.runs
        runs = tuple(
            dataclasses.replace(run, versions=run.versions | more)
            for more in ({}, {"judge": "aa"}, {"judge": "bb"})
        )
        report = build(dataclasses.replace(found, runs=runs), BINS)
        assert report["versions"] == dict(sorted(run.versions.items())) | {
            "judge": "unknown, aa, bb"
        }
        assert (report["run"], "runs" in report) == (run.run, False)


class TestSeveralRuns:
    def test_all_are_named_and_what_differs_is_listed(self, report):
        found = evidence()
        (run,) = found.runs
        second = dataclasses.replace(
            run,
            run="second",
            started="2025-01-03",
            profile="gpu",
            device=run.device | {"driver": "590", "cores": 32},
        )
        again = dataclasses.replace(second, started="2025-01-04")
        built = build(dataclasses.replace(found, runs=(run, second, again)), BINS)
        assert (built["run"], built["started"], built["profile"]) == (
            f"{run.run}, second",
            run.started,
            "ci, gpu",
        )
        assert built["runs"] == [
            {"run": run.run, "started": run.started, "profile": "ci"},
            {"run": "second", "started": "2025-01-03", "profile": "gpu"},
        ]
        assert built["device"] == run.device | {"driver": "580.65, 590", "cores": "16, 32"}
        assert "runs" not in report
        assert dumps(parse(strict_json.encode(built))) == dumps(built)
        assert f"Run `{run.run}, second`" in as_markdown(built)


class TestTightness:
    def test_dtypes_count_once_and_fp32_apart(self, report):
        worst = {
            (d["dtype"] == "float32", v["ref"], d["dtype"]): d["tensors"]["out"]["worst"]["r"]
            for v in report["variants"]
            for d in v["dtypes"]
            if "out" in d["tensors"]
        }
        found = {(one.tensor, one.inputs): one for one in tight.tightness(report)}
        for wide, inputs in ((False, "8 and 16 bits"), (True, "fp32")):
            ratios = sorted(r for (is_wide, *_), r in worst.items() if is_wide == wide)
            if not ratios:
                assert ("out", inputs) not in found
                continue
            middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2
            assert found["out", inputs][2:] == (len(ratios), middle, ratios[0], ratios[-1])
        assert len(worst) > 2
        assert "Tightness of the bounds" in as_markdown(report)

    def test_nothing_judged_nothing_said(self, report):
        assert tight.section(report | {"variants": []}, Beside()) is None
