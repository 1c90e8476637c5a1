"""A worker's session: a child that can die, and what is known of its leases then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.leased_campaigns import PLAIN, plan, sessions
from verify.campaign.leases.coordinator import Plan
from verify.campaign.leases.executor import Executor
from verify.campaign.leases.requests import Check, Work
from verify.campaign.leases.sources import sources_hash

WRONG = PLAIN.with_name("wrong_scale.py")

# A worker that starts a session, says what it is and which processes it has, and waits.
_WORKER = """
import sys, time
from pathlib import Path
from tests.harness.leased_campaigns import PLAIN, plan
from verify.campaign.leases.executor import Executor
from verify.cell.descendants import descendants
session = Executor(plan("c", PLAIN, examples=4, select="within").spec, print, Path(sys.argv[1]))
session.start()
print(type(session._process).__name__, session.pid, *descendants(session.pid), flush=True)
time.sleep(600)
"""


@pytest.fixture
def asked() -> Plan:
    return plan("c", WRONG, examples=4, select="within")


@pytest.fixture
def failing() -> list[bytes]:
    return []


@pytest.fixture
def session(asked: Plan, failing: list[bytes], tmp_path: Path) -> Iterator[Executor]:
    found = Executor(asked.spec, failing.append, tmp_path)
    yield found
    found.close()
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.for_ci
def test_a_session_serves_leases_and_is_started_again(
    session: Executor, asked: Plan, failing: list[bytes]
) -> None:
    hello = session.start()
    assert hello.sources == asked.sources
    (unit,) = hello.units
    assert b'"kind":"run"' in session.header
    assert session.ask(Check(1))[0].wrong == ""

    answer, first = session.ask(Work("a", unit.node, 1, shrinks=False))
    assert not answer.errors
    assert failing
    assert all(line in first for line in failing)
    shrunk = first.count(b'"phase":"shrink"')
    assert shrunk == 0
    answer, second = session.ask(Work("b", unit.node, 1))  # another lease is another search
    assert second.count(b'"kind":"begin"') >= first.count(b'"kind":"begin"')
    _, unknown = session.ask(Work("c", "no such test", 1))
    assert unknown == b""

    assert session.pid > 1
    os.kill(session.pid, signal.SIGKILL)
    answer, _ = session.ask(Work("d", unit.node, 1))
    assert "ended by signal 9" in answer.errors[0][2]
    answer, again = session.ask(Work("d", unit.node, 1, shrinks=False))
    assert not answer.errors
    assert again.count(b'"kind":"begin"') == first.count(b'"kind":"begin"')


@pytest.mark.for_ci
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has starters")
def test_a_session_is_a_fork_and_ends_with_its_worker(tmp_path: Path) -> None:
    """torch is imported once, by the starter that the worker has; kill -9 of the worker ends the
    session too."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        kind, *pids = worker.stdout.readline().split()
        assert kind == "Forked"
        assert all(map(_lives, pids))
        assert set(pids) <= {str(pid) for pid in sessions([worker.pid])}
        worker.kill()
    until = time.monotonic() + 20
    while any(map(_lives, pids)):
        assert time.monotonic() < until
        time.sleep(0.05)


def _lives(pid: str) -> bool:
    """Whether that process is there and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_sources_are_what_they_contain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "k.py", tmp_path / "there" / "k.py"
    other.parent.mkdir()
    one.write_text("x = 1\n")
    other.write_text("x = 1\n")
    assert sources_hash([one]) == sources_hash([other]) != sources_hash([])
    other.write_text("x = 2\n")
    assert sources_hash([one]) != sources_hash([other])
    monkeypatch.setattr("verify.campaign.leases.sources.judge_sources", lambda: {"j": other})
    assert sources_hash([one]) != sources_hash([one, other])
