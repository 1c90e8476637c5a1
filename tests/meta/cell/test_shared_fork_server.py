"""The tests' judges share a fork server that works and was started with the same variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.harness.shared_fork_server import SharedForkServer, end_all
from verify.cell.process import PLAIN_CPU, Cell


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    end_all()
    yield
    end_all()


def process_after_a_case() -> int:
    """The process of a fork server that was closed while it had a kernel process."""
    fork_server = SharedForkServer(PLAIN_CPU)
    assert Cell(fork_server).arch() == "cpu"
    assert fork_server._process is not None
    pid = fork_server._process.pid
    fork_server.close()
    assert not fork_server._children
    return pid


def test_the_next_goes_on_with_a_process_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first = process_after_a_case()
    assert process_after_a_case() == first
    os.kill(first, signal.SIGKILL)
    second = process_after_a_case()
    assert second != first
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert process_after_a_case() not in (first, second)
