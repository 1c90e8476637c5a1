"""The command line when a campaign ends: what it shows, interruption, full disks, exit codes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence, verdict
from tests.harness.finished_runs import PLAIN, command, passing, recorded, the_campaign_is
from verify.campaign import runner
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE
from verify.cli import summary
from verify.evidence import Evidence, errors
from verify.report import Report, build


def states(output: str) -> dict[str, str]:
    """The last column of the table, by variant (without dtypes)."""
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[-1] for row in rows}


def test_an_error_of_the_judge_is_named_beside_a_conviction(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = evidence(cases=6)
    erring, convicted = data.variants[0].ref, data.variants[1].ref
    verdicts = [v for v in data.verdicts if v.variant not in (erring, convicted)]
    verdicts.append(verdict(convicted, "float16", 0))
    order = recorded(
        "mixed", Evidence(runs=data.runs, variants=data.variants, verdicts=tuple(verdicts))
    )
    errors.record(
        order.directory,
        errors.JudgeError(erring, "test_x[it]", "ZeroDivisionError: the judge's own"),
    )
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: None)
    assert summary.finish(order, FAILED) == FAILED
    output = capsys.readouterr().out
    assert states(output)[erring] == summary.JUDGE_ERROR
    assert f"judge error: {erring}: ZeroDivisionError: the judge's own" in output
    assert {entry.ref for entry in data.variants} <= set(states(output)), (
        "every variant on trial is named"
    )


def test_what_is_incomplete_does_not_hold(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = passing()
    order = recorded("short", data)

    def report(missing: tuple[str, ...]) -> Report:
        return build(
            data, bins_required=lambda variant, dtype: missing if dtype == "bfloat16" else ()
        )

    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: report(("no such bin",)))
    assert summary.finish(order, CLEAN) == INFRASTRUCTURE
    output = capsys.readouterr().out
    assert f"incomplete: {data.variants[0].ref} (bfloat16): 1 of 1 coverage bins empty" in output
    assert output.count("holds") == 1
    assert summary.finish(order, CLEAN, complete=False) == CLEAN  # fuzz does not ask for more
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: report(()))
    assert summary.finish(order, CLEAN) == CLEAN
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: None)
    assert summary.finish(order, CLEAN) == INFRASTRUCTURE, (
        "another run's report says nothing of this one"
    )


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """SIGINT interrupts this process; a job in a shell's background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("sent", ["INT", "TERM"])
def test_an_interrupted_run_says_so_and_how_to_go_on(
    sent: str, at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = passing()
    order = recorded("ended", data)
    cases = len({v.case for v in data.verdicts})
    monkeypatch.setattr(runner, "_LAST_CASES", 0.2)
    # The child sends the signal to this process, as a terminal or a job scheduler would.
    the_campaign_is(monkeypatch, "sh", "-c", f"kill -{sent} $PPID; sleep 60")
    dtypes = "--dtype float32 --dtype float16"
    words = ("run", PLAIN, *dtypes.split(), "--examples", "7", "-k", "not long", "-x")
    words += ("--run-id", order.run_id)
    assert command(monkeypatch, *words) == INFRASTRUCTURE
    output = capsys.readouterr().out
    assert f"interrupted after {cases} cases" in output
    options = f"{dtypes} --examples 7 -k 'not long' --exitfirst --run-id ended"
    assert f"verify run {PLAIN} {options}" in output
    assert "holds" not in output
    assert "report.html" not in output


def test_an_interrupted_run_keeps_its_conviction(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("failed", evidence(cases=6))
    monkeypatch.setattr(runner, "_LAST_CASES", 0.2)
    the_campaign_is(monkeypatch, "sh", "-c", "kill -TERM $PPID; sleep 60")
    assert command(monkeypatch, "fuzz", PLAIN, "--run-id", "failed") == FAILED
    assert "continue with: verify fuzz" in capsys.readouterr().out


def test_the_end_of_the_time_is_no_interruption(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("timely", passing())
    the_campaign_is(monkeypatch, "sleep", "60")
    monkeypatch.setattr(runner, "_GRACE", 0.0)
    assert command(monkeypatch, "fuzz", PLAIN, "--run-id", "timely", "--max-time", "0.5") == CLEAN
    assert "interrupted" not in capsys.readouterr().out


# What cannot be written.


def test_a_directory_that_takes_nothing_is_told_in_one_line(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_home / ".verify").write_text("a file where a directory must be")
    assert command(monkeypatch, "run", PLAIN) == INFRASTRUCTURE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: cannot write evidence to .verify/runs/")


@pytest.mark.parametrize(
    "output",
    [
        "E   OSError: [Errno 28] No space left on device\nmore",
        "OSError: [Errno 30] Read-only file system: '.verify/runs/x'",
    ],
)
def test_a_disk_that_fills_is_told_in_one_line(
    output: str, at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("full", passing())
    the_campaign_is(monkeypatch, "sh", "-c", f'echo "{output}"; exit 3')
    assert command(monkeypatch, "run", PLAIN, "--run-id", "full") == INFRASTRUCTURE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "cannot write evidence" in line


def test_what_pytest_refuses_is_a_usage_error(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("refused", passing())
    said = "echo 'ERROR: run refused judged other sources'; exit 4"
    the_campaign_is(monkeypatch, "sh", "-c", said)
    assert command(monkeypatch, "run", PLAIN, "--run-id", "refused") == USAGE
    assert capsys.readouterr().out.strip() == "verify: run refused judged other sources"


@pytest.mark.parametrize("held", [False, True])
def test_a_killed_process_is_waited_for_whatever_a_signal_left_behind(held: bool) -> None:
    """SIGINT inside of `Popen.wait` can leave its lock taken, which nothing gives back."""
    process = subprocess.Popen(["sleep", "60"])
    if held:
        assert process._waitpid_lock.acquire(blocking=False)
    process.kill()
    assert runner._ended(process, 0.2) == -signal.SIGKILL
    if held:
        process._waitpid_lock.release()
    process.wait()
