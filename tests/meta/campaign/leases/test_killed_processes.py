"""A campaign of which everything is killed at random, again and again: workers, the scheduler, and
the command itself.  Started anew, it comes to the results of an undisturbed one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.leased_campaigns import PLAIN, killed, plan, results, sessions, undisturbed
from verify.bundle import ROOT
from verify.campaign.leases import journal
from verify.campaign.leases.events import Done, Event, Joined, Left
from verify.evidence import load

# What imports this file need not import `distributed`, which takes a second.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra [campaign] is not installed"
)

SEEDS = 3
FIRST = 11
_TIME = 420.0  # seconds until the campaign must have come to its end


@dataclass
class Processes:
    """The three processes of a campaign with a scheduler of its own, in one directory."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: int = 0

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.running.values() if process.poll() is None]

    def start(self, name: str) -> None:
        """Start one of them, after its end."""
        file = self.folder / "scheduler.json"
        if name == "scheduler":
            file.unlink(missing_ok=True)
            words = ["distributed.cli.dask_scheduler", "--scheduler-file", str(file)]
            words += ["--no-dashboard", "--port", "0", "--host", "127.0.0.1"]
        elif name == "workers":
            words = ["verify", "campaign", "--join", str(file), "--workers-here", "2"]
        else:
            words = ["verify", "campaign", "plain.py"]
            address = json.loads(file.read_text())["address"]
            one_way = ["--scheduler", address], ["--scheduler-file", str(file)]
            words += one_way[self.commands % 2]
            self.commands += 1
            words += ["--dtype", "float32", "--examples", "5", "-k", "counts or gathers or within"]
            words += ["--seeds", str(SEEDS), "--seed", str(FIRST), "--run-id", "k"]
        own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        own |= {"PYTHONPATH": str(ROOT), "VERIFY_SEARCH_SECONDS": "600"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.folder,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while name == "scheduler" and not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.1)

    def events(self) -> list[Event]:
        return list(journal.read(self.folder / ".verify" / "campaigns" / "k"))

    def kill_one(self, draw: random.Random) -> bool:
        """Kill a worker's process, the scheduler or the command; returns whether it was alive."""
        what = draw.choice(["worker", "worker", "scheduler", "command"])
        if what != "worker":
            return killed(self.running[what].pid, self.pids)
        events = self.events()
        gone = {event.worker for event in events if isinstance(event, Left)}
        joined = [e for e in events if isinstance(e, Joined) and e.worker not in gone]
        return bool(joined) and killed(draw.choice(joined).pid, self.pids)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    found = Processes(folder)
    try:
        yield found
    finally:
        for process in found.running.values():
            process.terminate()
        for process in found.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_only_processes_of_the_campaign_are_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as mine, subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert not killed(other.pid, [mine.pid])
            assert not killed(os.getpid(), [mine.pid])
            assert not killed(0, [mine.pid])
            assert killed(mine.pid, [mine.pid])
            assert mine.wait(10) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            mine.kill()
            other.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 2])
def test_a_campaign_outlives_all_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    shutil.copy(PLAIN, tmp_path / "plain.py")
    draw = random.Random(number)
    kills = 0
    until = time.monotonic() + _TIME
    with processes(tmp_path) as campaign:
        for name in ("scheduler", "workers", "command"):
            campaign.start(name)
        while campaign.running["command"].poll() != 0:
            assert time.monotonic() < until, (tmp_path / "command.log").read_text()
            time.sleep(draw.uniform(0.3, 1.5))
            for name, process in list(campaign.running.items()):
                if process.poll() not in (None, 0 if name == "command" else None):
                    campaign.start(name)
            some = any(isinstance(event, Done) for event in campaign.events())
            kills += kills < 6 and some and campaign.kill_one(draw)
        events = campaign.events()
        workers = [campaign.running["workers"].pid]
        assert not sessions(workers)  # the workers live on without one
    assert kills >= 2
    counted = Counter(event.lease for event in events if isinstance(event, Done))
    assert len(counted) == 3 * SEEDS + 1  # lengths are asked once, whatever the seed

    (run,) = (tmp_path / ".verify" / "runs").iterdir()
    evidence = load(run)
    alone = tmp_path / "alone"
    alone.mkdir()
    monkeypatch.chdir(tmp_path)
    seeds = range(FIRST, FIRST + SEEDS)
    chosen = "counts or gathers or within"
    asked = plan("k", Path("plain.py"), seeds=seeds, examples=5, select=chosen)
    lines, drawn = undisturbed(asked, tmp_path)
    (alone / "main.jsonl").write_bytes(lines)
    assert results(evidence) == results(load(alone))
    assert {(d.variant, d.dtype, d.group): d.drawn for d in evidence.drawn} == drawn
    assert not evidence.lost
