"""The end of a run from outside: cases under way are interrupted, and not lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.commands import verify
from tests.harness.finished_runs import PLAIN, command, passing, recorded, the_campaign_is
from tests.harness.rendered import as_markdown
from verify.bundle import ROOT
from verify.campaign import halt, interruption, runner
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, RunRequest
from verify.evidence import Evidence, Interruption, Recorder, being_written, load
from verify.report import Report, build
from verify.report.kept import with_kept
from verify.report.outcome import incomplete

VARIANT = passing().variants[0].ref
CASES = [f"{VARIANT}:default:accuracy:case-{n}" for n in range(6)]

# A campaign's session: a writer that died, one that goes on, and what ends the command.
SESSION = f"""
import os, signal, subprocess, sys, time
from verify.evidence import Recorder

def begin(worker, case, ahead=0):
    recorder = Recorder(sys.argv[1], worker)
    recorder.begin(case, "generate", {VARIANT!r}, ahead)
    return recorder

begin("gw0", {CASES[0]!r}).close()
kept = [begin("gw1", {CASES[1]!r}), begin("gw2", {CASES[2]!r})]
kept[1].begin({CASES[3]!r}, "generate", {VARIANT!r}, 1)
for _ in range(int(sys.argv[2])):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1)
time.sleep(60)
"""


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(
    signals: int, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int, Evidence, Path, float]:
    """The exit code of a run that gets so many signals, its evidence and directory, and the
    seconds that it took."""
    order = recorded("ended", passing())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = order.directory.absolute()
    the_campaign_is(monkeypatch, sys.executable, "-c", SESSION, str(folder), str(signals))
    begun = time.monotonic()
    code = command(monkeypatch, "run", PLAIN, "--run-id", "ended", *more)
    return code, load(folder), folder, time.monotonic() - begun


def unjudged(found: Evidence) -> tuple[list[str], list[str]]:
    return [each.case for each in found.lost], [each.case for each in found.interrupted]


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_signal_interrupts_what_living_judges_had_begun(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_LAST_CASES", 0.5)
    code, found, folder, _ = run(1, monkeypatch)
    assert code == INFRASTRUCTURE
    assert unjudged(found) == (CASES[:1], CASES[1:4]), "the judge of the first one has died before"
    assert (folder / interruption.MARKER).exists(), "no process begins another case"
    text = capsys.readouterr().out
    assert "a second Ctrl-C ends at once" in text
    assert "continue with: verify run" in text


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_second_signal_ends_at_once(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_LAST_CASES", 40.0)
    code, found, _, seconds = run(2, monkeypatch)
    assert code == INFRASTRUCTURE
    assert seconds < 20
    assert unjudged(found) == (CASES[:1], CASES[1:4])
    text = capsys.readouterr().out
    assert text.strip().endswith("verify: interrupted")
    assert "continue with" not in text


def test_the_end_of_the_time_interrupts_too(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = RunRequest(run_id="ended").directory.absolute() / "gw2.jsonl"

    def monotonic() -> float:
        """An hour passes when the session has begun its last case."""
        over = begun.exists() and CASES[3] in begun.read_text(encoding="utf-8")
        return time.monotonic() + 3600.0 * over

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=monotonic))
    code, found, folder, _ = run(0, monkeypatch, "--max-time", "900")
    assert code == CLEAN
    assert unjudged(found) == (CASES[:1], CASES[1:4])
    lines = (folder / f"{interruption.WORKER}.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in lines} == {"time"}
    assert found.ended == tuple(one.run for one in found.runs)


def test_a_search_whose_time_is_over_ends_its_test(tmp_path: Path) -> None:
    """However many examples are left: to draw them all would take an hour."""
    words = ("--examples", 1_000_000, "--dtype", "float32", "-k", "within")
    done = verify("run", PLAIN, *words, cwd=tmp_path, variables={"VERIFY_SEARCH_SECONDS": "0.5"})
    assert done.returncode == CLEAN, done.stdout
    assert "judge error" not in done.stdout


def test_the_marker_stops_a_campaign(tmp_path: Path) -> None:
    marker = tmp_path / interruption.MARKER
    halt.stop_at_interruption(marker)
    try:
        assert not halt.over()
        marker.touch()
        assert halt.over()
        assert halt.stopped() == "interrupted"
        interruption.forget(tmp_path)
        assert not halt.over()
    finally:
        halt.stop_at_interruption(None)


def test_a_report_tells_interrupted_cases_from_lost_ones(tmp_path: Path) -> None:
    data = passing()
    with Recorder(tmp_path, "gw0") as recorder:
        for record in (*data.runs, *data.variants, *data.verdicts):
            recorder.write(record)
        recorder.begin(CASES[0], "generate", VARIANT)
        recorder.write(Interruption(case=CASES[0], variant=VARIANT, reason="signal"))
    report = build(load(tmp_path), bins_required=())
    (variant,) = report["variants"]
    assert report["lost"] == []
    assert [one["case"] for one in report.get("interrupted", [])] == CASES[:1]
    assert variant["status"] == "grey", "a case that was begun has no verdict"
    assert "1 case interrupted when the run was ended" in variant["reasons"]
    assert "never judged" not in " ".join(variant["reasons"])
    assert VARIANT in dict(incomplete(report))
    shown = as_markdown(report)
    assert "interrupted (generate), since the run was ended" in shown
    assert "never judged" not in shown
    with Recorder(tmp_path, "gw0") as recorder:
        recorder.begin(CASES[0], "witness", VARIANT)  # the run went on, and its judge died
    assert unjudged(load(tmp_path)) == (CASES[:1], [])


def test_a_report_names_the_runs_that_were_ended(tmp_path: Path) -> None:
    data = passing()
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate(folders):
        with Recorder(folder, "gw0") as recorder:
            (run_of,) = data.runs
            began = replace(run_of, started=f"2026010{1 + number}T000000Z")
            for record in (began, *data.variants, *data.verdicts):
                recorder.write(record)
    assert "runs" not in build(load(folders[1]), bins_required=())
    (folders[1] / interruption.MARKER).touch()
    assert load(folders[1]).ended == (data.runs[0].run,)
    alone = build(load(folders[1]), bins_required=())
    assert [one.get("ended_early") for one in alone["runs"]] == [True]
    both = build(load(*folders), bins_required=())
    assert [one.get("ended_early") for one in both["runs"]] == [None, True]
    for report, name in ((alone, data.runs[0].run), (both, "two")):
        assert f"ended before it had asked everything: run `{name}`" in as_markdown(report)
    others: Report = {
        **alone,
        "runs": [{**one, "run": "another"} for one in alone["runs"]],
        "variants": [{**v, "ref": "other"} for v in alone["variants"]],
    }
    kept = with_kept(build(load(folders[0]), bins_required=()), others)
    assert [one.get("ended_early") for one in kept["runs"]] == [None, True]
    interruption.forget(folders[1])  # the run goes on
    assert "runs" not in build(load(folders[1]), bins_required=())


class TestBegunLast:
    """What a living judge had begun, as its file tells."""

    def recorded(self, folder: Path) -> list[str]:
        path = folder / "gw0.jsonl"
        interruption.record(folder, [path] if path.exists() else [], "signal")
        return [each.case for each in load(folder).interrupted]

    def test_an_error_of_the_judge_in_an_earlier_case_is_no_interruption(
        self, tmp_path: Path
    ) -> None:
        with Recorder(tmp_path, "gw0") as recorder:
            recorder.begin(CASES[0], "generate", VARIANT)
            recorder.begin(CASES[1], "generate", VARIANT)
        assert self.recorded(tmp_path) == CASES[1:2]
        assert [each.case for each in load(tmp_path).lost] == CASES[:1]

    def test_of_cases_begun_together_those_without_a_verdict(self, tmp_path: Path) -> None:
        done = passing().verdicts[0]
        with Recorder(tmp_path, "gw0") as recorder:
            recorder.begin(CASES[0], "generate", VARIANT)
            recorder.begin(done.case, "generate", VARIANT, 0)
            recorder.begin(CASES[1], "generate", VARIANT, 1)
            recorder.begin(CASES[2], "generate", VARIANT, 2)
            recorder.write(done)
        with recorder.path.open("ab") as file:
            file.write(b'{"kind":"verdict","ca')  # killed while it wrote
        assert self.recorded(tmp_path) == CASES[1:3]

    def test_in_a_long_file_the_end_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = passing().verdicts[0]
        with Recorder(tmp_path, "gw0") as recorder:
            for _ in range(40):
                recorder.begin(done.case, "generate", VARIANT)
                recorder.write(done)
            recorder.begin(CASES[0], "generate", VARIANT)
            for ahead in range(1, 5):
                recorder.begin(CASES[ahead], "generate", VARIANT, ahead)
        for size in (1, 100, 1000, 1 << 16):
            monkeypatch.setattr(interruption, "_BLOCK", size)
            assert [case for case, _ in interruption._begun(recorder.path)] == CASES[:5]

    def test_a_file_without_a_case_interrupts_nothing(self, tmp_path: Path) -> None:
        Recorder(tmp_path, "gw0").close()
        assert self.recorded(tmp_path) == []
        assert not (tmp_path / f"{interruption.WORKER}.jsonl").exists()


def test_a_file_is_being_written_as_long_as_its_writer_lives(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from verify.evidence import Recorder\n"
        "recorder = Recorder(sys.argv[1], 'gw0')\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "gw0.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert being_written(path)
        with Recorder(tmp_path, "gw0"):  # a second writer of the file is none of its business
            pass
        assert being_written(path)
        child.kill()
        child.wait()
    assert not being_written(path)
