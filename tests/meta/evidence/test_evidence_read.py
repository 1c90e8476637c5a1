"""Evidence read back: shapes checked, words shared, several runs as one."""

import dataclasses
import gc
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence
from tests.meta.evidence.test_evidence import FAILURE, ONE, TWO, record
from verify.evidence import Begin, Built, EvidenceError, LeftOut, load, strict_json

VERDICT = {"kind": "verdict", **strict_json.encode(FAILURE)}


class TestShapes:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"case": 7}, "verdict.case: Expected `str`, got `int`"),
            (
                {"measures": {"r_out": 1, "r_lse": "NaN"}},
                "verdict.measures[...]: Invalid enum value 'NaN'",
            ),
            (
                {"measures": {"r_out": True}},
                "verdict.measures[...]: Expected `float | str`, got `bool`",
            ),
            ({"measures": []}, "verdict.measures: Expected `object`, got `array`"),
            ({"bins": ["gqa", "tail", None]}, "verdict.bins[2]: Expected `str`, got `null`"),
            ({"bins": "gqa"}, "verdict.bins: Expected `array`, got `str`"),
            (
                {"finding": VERDICT["finding"] | {"count": 2**53 + 1}},
                "verdict.finding.count: Expected `int` <= 9007199254740992",
            ),
            (
                {"finding": VERDICT["finding"] | {"got": [1]}},
                "verdict.finding.got: Expected `float | str`, got `list`",
            ),
            (
                {"finding": VERDICT["finding"] | {"got": True}},
                "verdict.finding.got: Expected `float | str`, got `bool`",
            ),
            ({"finding": {}}, "verdict.finding.oracle: is missing"),
            ({"phase": ["witness"]}, "verdict.phase: Expected `str`, got `array`"),
            ({"outcome": "passed"}, "verdict.outcome: Invalid enum value 'passed'"),
        ],
    )
    def test_the_place_is_named(self, tmp_path, changes, message):
        (tmp_path / "gw0.jsonl").write_text("\n" + json.dumps(VERDICT | changes) + "\n")
        with pytest.raises(EvidenceError) as caught:
            load(tmp_path)
        assert str(caught.value).startswith(f"gw0.jsonl:2: {message}")

    @pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
    def test_not_finite_numbers_come_back_however_the_line_is_spaced(self, tmp_path, separators):
        told = {"seconds": {"run": "inf"}, "measures": {"lse_ulp": "nan", "z_lse": "-inf"}}
        told["finding"] = VERDICT["finding"] | {"got": "inf", "bound": "nan", "message": "nan"}
        line = json.dumps(VERDICT | told, separators=separators)
        (tmp_path / "gw0.jsonl").write_text(line + "\n")
        (found,) = load(tmp_path).verdicts
        assert found.seconds == {"run": math.inf}
        assert found.measures["z_lse"] == -math.inf
        assert f"{found.measures['lse_ulp']:.3g} {found.measures['z_lse']}" == "nan -inf"
        assert found.finding.got == math.inf
        assert math.isnan(found.finding.bound)
        assert found.finding.message == "nan"
        assert {"kind": "verdict", **strict_json.encode(found)} == VERDICT | told

    def test_hostile_text_stays_on_one_short_line(self, tmp_path):
        line = json.dumps(VERDICT | {"outcome": "a\n\x1b[31m\u202e - at `$.case`" + "x" * 5000})
        (tmp_path / "gw0.jsonl").write_text(line + "\n")
        with pytest.raises(EvidenceError) as caught:
            load(tmp_path)
        said = str(caught.value)
        assert said.startswith("gw0.jsonl:1: verdict.outcome: Invalid enum value 'a")
        assert said.isprintable()
        assert len(said) < 120

    @pytest.mark.parametrize("head", ['{"kind":"begin","more":', '{"more":'])
    def test_too_deep_nesting_is_named(self, tmp_path, head):
        (tmp_path / "gw0.jsonl").write_text(head + "[" * 200_000 + "\n")
        with pytest.raises(EvidenceError, match=r"^gw0.jsonl:1: is nested too deeply$"):
            load(tmp_path)

    def test_the_last_of_two_equal_keys_counts(self, tmp_path):
        for separators in ((",", ":"), (", ", ": ")):
            line = json.dumps(VERDICT, separators=separators)
            (tmp_path / "gw0.jsonl").write_text(line[:-1] + ',"config":"again"}\n')
            assert load(tmp_path).verdicts[0].config == "again"

    def test_equal_words_are_one_object(self, tmp_path):
        record(tmp_path, ONE, dataclasses.replace(ONE, oracle="repeat"))
        first, second = load(tmp_path).verdicts
        assert first.case is second.case
        assert first.bins[0] is second.bins[0]
        assert all(a is b for a, b in zip(first.measures, second.measures, strict=True))

    def test_the_collector_is_left_as_it_was(self, tmp_path):
        load(tmp_path)
        assert gc.isenabled()
        (tmp_path / "gw0.jsonl").write_text("[]\n")
        with pytest.raises(EvidenceError):
            load(tmp_path)
        assert gc.isenabled()


def with_another_source(folder: Path, copy: Path) -> Path:
    """Record a run again, under another name and with another source of each variant."""
    shutil.copytree(folder, copy)
    for path in copy.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'"source_hash":\s*"[^"]*"', '"source_hash":"new"', text)
        path.write_text(re.sub(r'"run":\s*"[^"]*"', '"run":"again"', text), encoding="utf-8")
    return copy


class TestSeveral:
    """Runs that are read together: h1 began before h2."""

    @pytest.fixture
    def folders(self, tmp_path):
        (run,) = evidence(1).runs
        (entry,) = (each for each in evidence(1).variants if each.ref == ONE.variant)
        drawn = dataclasses.replace(evidence(1).drawn[0], variant=ONE.variant)
        passed = dataclasses.replace(
            FAILURE, outcome="pass", measures={}, finding=None, time=FAILURE.time + 9
        )
        record(
            tmp_path / "h1",
            run,
            entry,
            FAILURE,
            ONE,
            Begin(case=TWO.case, phase="generate", time=1.0),
            drawn,
        )
        later = dataclasses.replace(run, started="2025-01-02T00:00:00+00:00")
        path = record(
            tmp_path / "h2",
            later,
            dataclasses.replace(entry, unavailable="gone"),
            passed,
            ONE,
            TWO,
            drawn,
        )
        with path.open("ab") as file:
            file.write(b'{"kind"\n')
        return tmp_path / "h1", tmp_path / "h2"

    def test_as_one(self, folders):
        found = load(*folders)
        assert [v.case for v in found.verdicts] == sorted([ONE.case, TWO.case, FAILURE.case])
        assert found.verdict_of(FAILURE.case).outcome == "fail"
        assert found.unstable == ((FAILURE.case, FAILURE.oracle),)
        assert (len(load(folders[0]).lost), found.lost) == (1, ())
        assert [(d.drawn, d.refused) for d in found.drawn] == [(680, 24)]
        assert found.torn == ("h2/gw0.jsonl:7",)
        assert [run.run for run in found.runs] == ["h1", "h2"]
        assert [entry.unavailable for entry in found.variants] == ["gone"]
        assert found.changed == ()

    def test_in_any_order_and_once_each(self, folders):
        assert load(*reversed(folders)) == load(*folders) == load(*folders, folders[0])

    def test_one_alone_keeps_its_name(self, folders):
        assert load(folders[0], folders[0]) == load(folders[0])
        assert load(folders[0]).run.run == evidence(1).run.run

    def test_only_the_newest_source_counts(self, folders, tmp_path):
        """The other run's verdicts, draws, builds and lost cases of the variant are left out."""
        older, newer = folders
        (entry,) = load(newer).variants
        built = Built(variant=entry.ref, arch="sm_90", build="b", seconds=1.0, resources=None)
        record(older, built, worker="gw1")
        changed = with_another_source(newer, tmp_path / "h3")
        alone = load(changed)
        found = load(older, changed)
        assert found.changed == ()
        assert found.left_out == (LeftOut(entry.ref, "h1", 2, 1),)
        for name in ("variants", "verdicts", "unstable", "lost", "drawn", "not_run", "builds"):
            assert getattr(found, name) == getattr(alone, name), name
        assert [each.run for each in found.runs] == ["h1", "h3"]
        assert load(changed, older) == found

    def test_a_variant_whose_source_is_the_same_keeps_all(self, folders, tmp_path):
        """Sources are compared variant by variant."""
        older, newer = folders
        (entry,) = load(newer).variants
        other = dataclasses.replace(entry, ref="other", source_hash="old")
        record(older, other, dataclasses.replace(ONE, case="other:1", variant="other"))
        record(newer, dataclasses.replace(other, source_hash="new"))
        found = load(*folders)
        assert found.left_out == (LeftOut("other", "h1", 1, 0),)
        assert {verdict.case for verdict in found.verdicts} == {ONE.case, TWO.case, FAILURE.case}

    def test_a_continued_run_is_as_new_as_its_last_beginning(self, folders):
        older, newer = folders
        (entry,) = load(newer).variants
        record(newer, dataclasses.replace(entry, source_hash="new"))
        assert load(older, newer).changed == (entry.ref,), "the newest run knew two sources"
        (run,) = load(older).runs
        record(older, dataclasses.replace(run, started="2025-01-03T00:00:00+00:00"), worker="gw1")
        found = load(older, newer)
        assert found.changed == ()
        assert [one.run for one in found.left_out] == ["h2"]

    def test_sources_of_the_same_second_cannot_be_told_apart(self, folders, tmp_path):
        again = with_another_source(folders[1], tmp_path / "h3")
        (entry,) = load(again).variants
        assert load(folders[1], again).changed == (entry.ref,)
        assert load(folders[1], again).left_out == ()

    def test_a_copy_is_refused(self, folders, tmp_path):
        record(tmp_path / "h3", *load(folders[1]).runs, worker="gw9")
        with pytest.raises(
            EvidenceError,
            match=r"h2 and .*h3 both hold the run .* of 2025-01-02T.*: name one of them",
        ):
            load(*folders, tmp_path / "h3")

    def test_one_that_does_not_say_where_it_ran_is_refused(self, folders, tmp_path):
        record(tmp_path / "h3", ONE)
        with pytest.raises(EvidenceError, match="h3: has no run record"):
            load(*folders, tmp_path / "h3")

    def test_a_wrong_line_is_named_with_its_directory(self, folders):
        (folders[1] / "gw1.jsonl").write_text("[]\n")
        with pytest.raises(EvidenceError, match=r"^h2/gw1.jsonl:1: kind None"):
            load(*folders)


class TestFurther:
    def test_a_verdict_that_is_not_recorded_is_joined(self):
        found = evidence(5)
        (before,) = (v for v in found.verdicts if v.case == ONE.case)
        again = dataclasses.replace(before, outcome="fail", finding=FAILURE.finding)
        joined = found.with_verdicts([again])
        assert joined.verdict_of(ONE.case).outcome == "fail"
        assert joined.unstable == ((ONE.case, ONE.oracle),)
        assert len(joined.verdicts) == len(found.verdicts)
        assert found.with_verdicts([]) is found


class TestMeasures:
    """A verdict that passes while its own measure convicts is a failure, whatever wrote it."""

    @pytest.mark.parametrize("name", ["r_out", "r_lse", "r_dq", "long_r_out", "exact_scores_r_lse"])
    @pytest.mark.parametrize("r", [1.0000001, 4.8e4, "inf", "nan"])
    def test_a_pass_beyond_its_bound_fails(self, tmp_path, name, r):
        (tmp_path / "gw0.jsonl").write_text(passing({name: r}))
        (found,) = load(tmp_path).verdicts
        assert found.outcome == "fail"
        assert f"recorded as passing with {name} = " in found.finding.message

    @pytest.mark.parametrize(
        "measures",
        [
            {"r_out": 1.0},
            {"max_error_out": 7.0, "rows_dq": 9.0, "z_lse": 3.0},
            {"bound_ratio": 107.0},
        ],
    )
    def test_other_measures_decide_nothing(self, tmp_path, measures):
        (tmp_path / "gw0.jsonl").write_text(passing(measures))
        assert load(tmp_path).verdicts[0].outcome == "pass"

    def test_what_is_not_asked_is_not_judged(self, tmp_path):
        line = json.loads(passing({"r_out": 2.0})) | {"outcome": "inapplicable"}
        (tmp_path / "gw0.jsonl").write_text(json.dumps(line) + "\n")
        assert load(tmp_path).verdicts[0].outcome == "inapplicable"


def passing(measures):
    """A line of evidence that says pass."""
    return json.dumps(VERDICT | {"outcome": "pass", "finding": None, "measures": measures}) + "\n"
