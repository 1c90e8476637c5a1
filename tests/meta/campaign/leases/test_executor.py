"""A worker's session: a child that can die, and what is known of its leases then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.leased_campaigns import PLAIN, plan
from verify.campaign.leases.coordinator import Plan
from verify.campaign.leases.executor import Executor
from verify.campaign.leases.requests import Check, Work
from verify.campaign.leases.sources import sources_hash

WRONG = PLAIN.with_name("wrong_scale.py")


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
