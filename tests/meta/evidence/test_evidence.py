"""Evidence on disk: nothing that was written is lost, whatever dies."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.harness.fake_campaign import evidence, failing, verdict
from verify.evidence import Begin, Drawn, EvidenceError, Recorder, load, new_run_id, strict_json
from verify.machine import device
from verify.problem import Problem

ONE = verdict("triton-fwd", "float16", 0)
TWO = verdict("triton-fwd", "float16", 1)
FAILURE = failing(
    "triton-fwd", "float16", 5, Problem(seqlen_q=3, seqlen_kv=2, head_dim=16, dtype="float16")
)


def record(folder, *records, worker="gw0") -> Path:
    with Recorder(folder, worker) as recorder:
        for item in records:
            recorder.write(item)
        return recorder.path


class TestRoundTrip:
    def test_all_kinds(self, tmp_path):
        found = evidence(5)
        record(tmp_path, *found.runs, *found.variants, *found.lost, *found.verdicts)
        record(tmp_path, *found.drawn, *found.not_run, *found.builds)
        assert dataclasses.replace(load(tmp_path), verdicts=()) == dataclasses.replace(
            found, verdicts=()
        )
        # NaN differs from itself, so compare what is written.
        written = strict_json.dumps(tuple(found.verdicts))
        assert strict_json.dumps(tuple(load(tmp_path).verdicts)) == written

    def test_not_finite_numbers_are_strings_on_disk(self, tmp_path):
        measures = {"r_out": math.nan, "r_lse": math.inf, "max_error": -math.inf}
        path = record(tmp_path, dataclasses.replace(ONE, measures=measures))
        line = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert line["measures"] == {"r_out": "nan", "r_lse": "inf", "max_error": "-inf"}
        (back,) = load(tmp_path).verdicts
        assert math.isnan(back.measures["r_out"])
        assert (back.measures["r_lse"], back.measures["max_error"]) == (math.inf, -math.inf)

    def test_text_that_looks_like_a_number_stays_text(self, tmp_path):
        record(tmp_path, dataclasses.replace(ONE, config="nan", bins=("inf",)))
        (back,) = load(tmp_path).verdicts
        assert (back.config, back.bins) == ("nan", ("inf",))

    def test_messages_with_line_ends_and_broken_unicode(self, tmp_path):
        finding = dataclasses.replace(FAILURE.finding, message="one\ntwo\r\u2028\x00 \ud800 é")
        path = record(tmp_path, dataclasses.replace(FAILURE, finding=finding), ONE)
        assert len(path.read_bytes().splitlines()) == 2
        assert load(tmp_path).verdict_of(FAILURE.case).finding.message == finding.message

    def test_a_verdict_is_stamped(self, tmp_path):
        record(tmp_path, dataclasses.replace(ONE, time=0.0))
        assert load(tmp_path).verdicts[0].time > 1.7e9


class TestDeath:
    @pytest.mark.parametrize("cut", [1, 2, 40, 200])
    def test_a_torn_last_line_is_counted_and_the_rest_kept(self, tmp_path, cut):
        path = record(tmp_path, ONE, TWO)
        size = path.stat().st_size
        os.truncate(path, size - cut)
        found = load(tmp_path)
        whole = cut == 1  # only the line's end is missing
        assert [v.case for v in found.verdicts] == sorted(
            [ONE.case, TWO.case] if whole else [ONE.case]
        )
        assert found.torn == (() if whole else ("gw0.jsonl:2",))

    def test_continuing_after_a_torn_line(self, tmp_path):
        path = record(tmp_path, ONE, TWO)
        os.truncate(path, path.stat().st_size - 50)
        record(tmp_path, FAILURE)
        found = load(tmp_path)
        assert {v.case for v in found.verdicts} == {ONE.case, FAILURE.case}
        assert found.torn == ("gw0.jsonl:2",)

    def test_torn_inside_a_character(self, tmp_path):
        path = record(tmp_path, ONE)
        with path.open("ab") as file:
            file.write('{"kind": "é'.encode()[:-1])
        assert load(tmp_path).torn == ("gw0.jsonl:2",)

    def test_a_killed_writer_loses_nothing_that_it_had_written(self, tmp_path):
        script = (
            "import itertools, sys\n"
            "from verify.evidence import Begin, Recorder\n"
            "recorder = Recorder(sys.argv[1], 'gw1')\n"
            "for i in itertools.count():\n"
            "    recorder.begin(f'case-{i}' + 'x' * 2000, 'generate')\n"
            "    print(i, flush=True)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            for _ in range(200):
                child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            printed = 200 + len(child.stdout.read().split())
        found = load(tmp_path)
        assert printed <= len(found.lost) <= printed + 1
        assert len(found.torn) <= 1

    def test_a_case_without_a_verdict_is_lost(self, tmp_path):
        with Recorder(tmp_path, "gw0") as recorder:
            recorder.begin(ONE.case, "generate", "triton-fwd")
            recorder.write(ONE)
            recorder.begin(TWO.case, "shrink", "triton-fwd")
        found = load(tmp_path)
        assert [(b.case, b.phase, b.variant) for b in found.lost] == [
            (TWO.case, "shrink", "triton-fwd")
        ]
        record(tmp_path, TWO, worker="gw1")
        assert load(tmp_path).lost == ()


class TestWriters:
    def test_two_processes_and_one_file(self, tmp_path):
        script = (
            "import sys\nfrom verify.evidence import Drawn, Recorder\nwith Recorder(sys.argv[1],"
            " sys.argv[2]) as recorder:\n    for i in range(300):\n       "
            " recorder.write(Drawn(variant='v', dtype='float16', group='x' * 3000, drawn=2,"
            " refused=1))\n"
        )
        writers = [
            subprocess.Popen([sys.executable, "-c", script, str(tmp_path), worker])
            for worker in ("gw0", "gw0", "gw1")
        ]
        assert [writer.wait() for writer in writers] == [0, 0, 0]
        found = load(tmp_path)
        assert [(d.drawn, d.refused) for d in found.drawn] == [(1800, 900)]
        assert found.torn == ()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gw0.jsonl", "gw1.jsonl"]

    @pytest.mark.parametrize("worker", ["", "../x", "a/b", ".hidden", "a b"])
    def test_worker_names(self, tmp_path, worker):
        with pytest.raises(EvidenceError, match="worker"):
            Recorder(tmp_path, worker)

    def test_closed(self, tmp_path):
        recorder = Recorder(tmp_path)
        recorder.close()
        recorder.close()
        with pytest.raises(EvidenceError, match="is closed"):
            recorder.write(ONE)

    def test_run_ids_sort_by_time_and_differ(self):
        early, late = (new_run_id(datetime(year, 1, 1, tzinfo=UTC)) for year in (2024, 2025))
        assert early < late
        assert new_run_id() != new_run_id()


class TestJoining:
    def test_the_last_verdict_stands(self, tmp_path):
        record(tmp_path, dataclasses.replace(ONE, time=5.0, config="new"))
        record(tmp_path, dataclasses.replace(ONE, time=4.0, config="old"), worker="gw1")
        (found,) = load(tmp_path).verdicts
        assert found.config == "new"

    def test_oracles_of_one_case_are_apart(self, tmp_path):
        record(tmp_path, ONE, dataclasses.replace(ONE, oracle="repeat"))
        found = load(tmp_path)
        assert len(found.verdicts) == 2
        assert found.judged == {ONE.case}
        assert found.verdict_of(ONE.case, "repeat").oracle == "repeat"
        assert found.verdict_of("unknown") is None

    def test_a_failure_outlives_a_later_pass(self, tmp_path):
        later = dataclasses.replace(
            FAILURE, outcome="pass", measures={}, finding=None, time=FAILURE.time + 1
        )
        record(tmp_path, FAILURE, later)
        found = load(tmp_path)
        assert found.verdict_of(FAILURE.case).outcome == "fail"
        assert found.unstable == ((FAILURE.case, FAILURE.oracle),)

    def test_a_case_found_again_while_shrinking_stays_counted(self, tmp_path):
        record(
            tmp_path, FAILURE, dataclasses.replace(FAILURE, phase="shrink", time=FAILURE.time + 1)
        )
        (found,) = load(tmp_path).verdicts
        assert found.counted

    def test_a_changed_source_is_named(self, tmp_path):
        entry = evidence(1).variants[0]
        record(tmp_path, entry, dataclasses.replace(entry, source_hash="other"))
        assert load(tmp_path).changed == (entry.ref,)


class TestRefusing:
    def test_no_directory(self, tmp_path):
        with pytest.raises(EvidenceError, match="is no run directory"):
            load(tmp_path / "missing")

    def test_no_run_record(self, tmp_path):
        with pytest.raises(EvidenceError, match="no run record"):
            _ = load(tmp_path).run

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"kind": "rumour"}', "gw0.jsonl:1: kind 'rumour'"),
            ("[]", "gw0.jsonl:1: kind None"),
            (
                '{"kind": "run", "schema": 9}',
                "gw0.jsonl:1: evidence of schema 9; this version reads 1",
            ),
            (
                '{"kind": "begin", "case": "c", "phase": "generate"}',
                "gw0.jsonl:1: begin.time: is missing",
            ),
            (
                '{"kind": "begin", "case": "c", "phase": "boast", "time": 1}',
                "gw0.jsonl:1: begin.phase: Invalid enum value 'boast'",
            ),
            (
                (
                    '{"kind": "drawn", "variant": "v", "dtype": "d", "group": "g", "drawn": 1.5,'
                    ' "refused": 0}'
                ),
                "drawn.drawn: Expected `int`, got `float`",
            ),
        ],
    )
    def test_whole_lines_that_are_no_records(self, tmp_path, line, message):
        (tmp_path / "gw0.jsonl").write_text(line + "\n")
        with pytest.raises(EvidenceError) as caught:
            load(tmp_path)
        assert message in str(caught.value)

    def test_json_with_pythons_nan_is_a_damaged_line(self, tmp_path):
        (tmp_path / "gw0.jsonl").write_text(
            '{"kind": "begin", "case": "c", "phase": "generate", "time": NaN}\n'
        )
        assert load(tmp_path).torn == ("gw0.jsonl:1",)

    def test_what_is_no_json_value(self):
        with pytest.raises(TypeError, match="is no JSON value"):
            strict_json.dumps({"a": object()})

    def test_a_line_is_what_the_text_of_a_value_is(self):
        plain = {"kind": "passed", "told": ({"r": 0.1 + 0.2, "n": 3},), "set": {"b", "a"}}
        for value in (
            plain,
            plain | {"r": math.nan, "deep": [{"x": -math.inf}]},
            {"record": ONE, "number": np.float64(0.25), "text": "\udc80 ü", "none": None},
        ):
            assert strict_json.line(value) == strict_json.dumps(value)
        with pytest.raises(TypeError, match="is no JSON value"):
            strict_json.line({"a": object()})


def test_later_fields_are_ignored(tmp_path):
    data = strict_json.encode(Drawn(variant="v", dtype="float16", group="g", drawn=1, refused=0))
    (tmp_path / "gw0.jsonl").write_text(json.dumps({"kind": "drawn", **data, "future": 1}) + "\n")
    assert load(tmp_path).drawn[0].drawn == 1


def test_begin_needs_no_variant(tmp_path):
    record(tmp_path, Begin(case="c", phase="witness", time=1.0))
    assert load(tmp_path).lost[0].variant == ""


class TestDevice:
    def test_fields_and_nothing_personal(self):
        found = device.fingerprint()
        assert list(found) == (
            [
                "slug",
                "kind",
                "name",
                "capability",
                "driver",
                "cuda",
                "torch",
                "triton",
                "numpy",
                "python",
                "platform",
                "cores",
            ]
        )
        assert found["slug"] == device.slug()
        said = strict_json.dumps(found)
        assert os.uname().nodename not in said
        assert str(Path.home()) not in said

    def test_triton_and_torch_stay_out_of_the_process(self):
        script = (
            "import sys; from verify.machine import device; device.fingerprint();"
            " print('triton' in sys.modules, 'torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["False", "False"]

    @pytest.mark.parametrize(
        ("name", "slug"),
        [
            ("AMD EPYC 7B13", "cpu-amd-epyc-7b13"),
            ("AMD EPYC 7B13 64-Core Processor", "cpu-amd-epyc-7b13"),
            ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cpu-intel-xeon-platinum-8481c"),
            ("13th Gen Intel(R) Core(TM) i9-13900K", "cpu-intel-core-i9-13900k"),
            ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "cpu-amd-ryzen-7-7840u"),
            ("Intel(R) Xeon(R) Processor", "cpu-intel-xeon-family-6-model-143"),
            ("AMD EPYC", "cpu-amd-epyc-family-6-model-143"),
            ("Neoverse-V1", "cpu-neoverse-v1"),
            ("x86_64", "cpu-x86_64"),
            ("../../\ud800 9", "cpu-9"),
        ],
    )
    def test_a_cpu_is_called_by_its_model(self, name, slug):
        assert (
            device.cpu_slug("cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: whatever\n", name)
            == slug
        )

    def test_a_cpu_that_says_nothing(self, monkeypatch):
        monkeypatch.setattr(device, "_cpuinfo", lambda: "processor\t: 0\n")
        monkeypatch.setattr(device, "_output", lambda command: "Model name:   Neoverse-V1\n")
        assert device.cpu_slug("", device._cpu_name()) == "cpu-neoverse-v1"

    def test_slugs(self):
        assert device.slug_of("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
        assert (
            device.slug_of("NVIDIA RTX 6000 Ada/Workstation (TM)")
            == "nvidia-rtx-6000-ada-workstation-tm"
        )
        assert device.slug_of("..") == "unknown"

    @pytest.mark.parametrize(
        ("visible", "chosen"),
        [
            (None, ["A", "B"]),
            ("", []),
            ("1", ["B"]),
            ("1,0", ["B", "A"]),
            ("GPU-bb", ["B"]),
            ("0,9,1", ["A"]),
            ("-1", []),
        ],
    )
    def test_visible_devices(self, visible, chosen):
        gpus = [["0", "GPU-aa", "A", "9.0", "580"], ["1", "GPU-bb", "B", "8.0", "580"]]
        assert [gpu[2] for gpu in device._visible(gpus, visible)] == chosen

    def test_a_gpu_as_nvidia_smi_tells_it(self, monkeypatch):
        line = "0, GPU-aa, NVIDIA H100 80GB HBM3, 9.0, 580.65.06\n"
        monkeypatch.setattr(device, "_output", lambda command: line)
        assert device._gpu(None) == {
            "kind": "cuda",
            "name": "NVIDIA H100 80GB HBM3",
            "capability": "9.0",
            "driver": "580.65.06",
        }
        assert device._gpu("") is None

    def test_two_models_ask_torch(self, monkeypatch):
        lines = "0, GPU-aa, Slow, 8.0, 580\n1, GPU-bb, Fast, 9.0, 580\n"
        monkeypatch.setattr(
            device, "_output", lambda command: lines if command[0] == "nvidia-smi" else "Fast,9.0\n"
        )
        assert device._gpu(None)["name"] == "Fast"
