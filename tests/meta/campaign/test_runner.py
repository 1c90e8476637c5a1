"""The runner's processes: their end, the lock of a run, and the counts of a continued run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verify import cli
from verify.campaign import halt
from verify.campaign.run import BusyError, CampaignRun
from verify.campaign.runner import FAILED, USAGE
from verify.campaign.targets import Target
from verify.cell.process import ROOT
from verify.evidence import load
from verify.oracles import groups
from verify.problem import Problem

SAMPLES = ROOT / "tests" / "sample_kernels"

PLAIN = '''
"""A plain kernel."""
import torch

DTYPES = ("float32",)


def attention(q, k, v):
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
'''

SLEEPS = PLAIN.replace("    return", "    import time; time.sleep(600)\n    return")


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(autouse=True)
def _to_the_end() -> Iterator[None]:
    yield
    halt.stop_at_first_failure(None)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *words])
    return cli.main()


def descendants(process: int) -> set[int]:
    pids = set()
    for task in Path(f"/proc/{process}/task").glob("*"):
        for child in (task / "children").read_text().split():
            pids |= {int(child)} | descendants(int(child))
    return pids


def wait_for(met: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def alive(process: int) -> bool:
    """Whether the process is running; a zombie is not."""
    try:
        return (
            re.search(r"^State:\s*Z", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
            is None
        )
    except OSError:
        return False


def test_a_killed_command_leaves_no_process_and_no_lock(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 of the command, which has a worker and a cell; while it runs, no other process gets
    the run."""
    (at_home / "sleeps.py").write_text(SLEEPS)
    words = [
        sys.executable,
        "-m",
        "verify",
        "run",
        "-n",
        "1",
        "--run-id",
        "mine",
        "-k",
        "_within_",
        "sleeps.py",
    ]
    directory = at_home / ".verify" / "runs" / "mine"
    run = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env=os.environ | {"VERIFY_DEADLINE": "300"}
    )
    below: set[int] = set()
    try:
        worker = directory / "gw0.jsonl"
        wait_for(
            lambda: worker.is_file() and '"begin"' in worker.read_text(), 240, "no case was begun"
        )
        # pytest, a worker, a fork server and a kernel process
        wait_for(lambda: len(descendants(run.pid)) >= 4, 60, "no cell has a process")
        below = descendants(run.pid)
        assert command(monkeypatch, "run", "-n", "0", "--run-id", "mine", "sleeps.py") == USAGE
        (line,) = capsys.readouterr().out.strip().splitlines()
        assert "another process is judging run mine" in line
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, below)), 60, "some process outlives the command")
    finally:
        for process in (run.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.wait()
    CampaignRun(directory, "dev", ()).lock().release()


def test_the_signal_of_a_parents_death_is_asked_for_in_one_place() -> None:
    """If the parent has ended already, its death signal never comes; `leash` checks for that."""
    files = (ROOT / "verify").rglob("*.py")
    asking = [path.name for path in files if "PDEATHSIG" in path.read_text(encoding="utf-8")]
    assert asking == ["leash.py"]
    script = (
        "import os; from verify.machine.leash import die_with; die_with(os.getpid()); os._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 1


def test_one_process_has_a_run(tmp_path: Path) -> None:
    run = CampaignRun(tmp_path / "run", "dev", ())
    lock = run.lock()
    with pytest.raises(BusyError, match="another process is judging run run"):
        CampaignRun(tmp_path / "run", "dev", ()).lock()
    lock.release()
    CampaignRun(tmp_path / "run", "dev", ()).lock().release()


# The first failure.


def test_the_first_failure_stops_all_workers(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = at_home / "zeros.py"
    kernel.write_text((SAMPLES / "wrong_zeros.py").read_text())
    assert command(monkeypatch, "run", "-x", "-n", "2", "zeros.py") == FAILED
    output = capsys.readouterr().out
    assert "stopped at the first failure" in output
    assert "wrong" in output
    (run,) = (at_home / ".verify" / "runs").iterdir()
    evidence = load(run)
    assert not evidence.lost, "what was begun is judged"
    assert not any(
        verdict.finding and "crash" in verdict.finding.message for verdict in evidence.verdicts
    )
    # a test asks all groups of a family
    asked = {groups()[verdict.group].family or verdict.group for verdict in evidence.verdicts}
    assert len(asked) <= 4, "two workers, and what each had in hand"
    assert sum(record.drawn for record in evidence.drawn) > 0, "workers ended in good order"


def test_a_failure_stops_where_it_was_asked_for_alone(tmp_path: Path) -> None:
    halt.failed()
    assert not halt.over()
    halt.stop_at_first_failure(tmp_path / "failed")
    assert halt.armed()
    assert not halt.over()
    halt.failed()
    assert halt.stopped()
    assert halt.over()


def test_the_deadline_uses_a_clock_that_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(halt.UNTIL, str(time.monotonic() + 100))
    monkeypatch.setattr(time, "time", lambda: 4e9)  # somebody sets the clock
    assert not halt.out_of_time()
    monkeypatch.setenv(halt.UNTIL, str(time.monotonic() - 1))
    assert halt.out_of_time()


# A run that goes on.


def test_what_was_drawn_is_counted_once_when_a_run_goes_on(tmp_path: Path) -> None:
    kernel = tmp_path / "plain.py"
    kernel.write_text(PLAIN)
    run = CampaignRun(tmp_path / "run", "dev", (kernel,))
    (declared,) = run.roster.declarations
    target = Target(declared, declared.configs[0], "float32", "accuracy")
    problems = [Problem(seqlen_q=2, seqlen_kv=n, head_dim=16, dtype="float32") for n in (2, 3)]
    first = run.judge("gw0")
    first.judge(target, problems[0])
    first.close()
    again = CampaignRun(run.directory, "dev", (kernel,))
    again.resume()
    second = again.judge("gw0")
    second.judge(target, problems[0])  # stands
    second.judge(target, problems[1])
    assert sum(second.drawn.values()) == 1
    second.drawn.clear()  # as if it had been killed before it could write how much it had drawn
    second.close()
    CampaignRun(run.directory, "dev", (kernel,)).resume()
    assert sum(record.drawn for record in load(run.directory).drawn) == 2
    CampaignRun(run.directory, "dev", (kernel,)).resume()
    assert sum(record.drawn for record in load(run.directory).drawn) == 2
