"""Kernel files are loaded several at a time, and each is answered for what it does itself."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from verify.cell import discovery
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, ForkServer

RIGHT = """
import time

import torch

time.sleep({})


def attention(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
"""
# Ends the process from which kernel processes are forked, and all of these with it.
ENDS_ALL = """
import os
import signal
import time

time.sleep(0.3)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(30)
"""


def test_a_file_that_ends_the_others_is_the_one_that_does_not_load(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "cores", lambda: 4)
    texts = {"a": RIGHT.format(0), "ends": ENDS_ALL, "b": RIGHT.format(1), "c": RIGHT.format(1)}
    files = []
    for stem, text in texts.items():
        files.append(tmp_path / f"{stem}.py")
        files[-1].write_text(text, encoding="utf-8")
    found = roster(files, fork_server)
    assert [Path(each.path).stem for each in found.declarations] == ["a", "b", "c"]
    assert [Path(each.path).stem for each in found.failures] == ["ends"]


def test_they_are_loaded_at_the_same_time_and_listed_in_their_order(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until the other has begun."""
    monkeypatch.setattr(discovery, "cores", lambda: 2)
    files = []
    for mine, other in (("b", "a"), ("a", "b")):
        wait = (
            "import pathlib, time\n"
            f"pathlib.Path({str(tmp_path / mine)!r}).touch()\n"
            "ends = time.monotonic() + 30\n"
            f"while not pathlib.Path({str(tmp_path / other)!r}).exists():\n"
            "    assert time.monotonic() < ends\n    time.sleep(0.01)\n"
        )
        files.append(tmp_path / f"{mine}.py")
        files[-1].write_text(wait + RIGHT.format(0), encoding="utf-8")
    found = roster(files, fork_server)
    assert [Path(each.path).stem for each in found.declarations] == ["b", "a"]
    assert not found.failures


def test_an_interruption_waits_for_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    monkeypatch.setattr(discovery, "cores", lambda: 2)
    files = [tmp_path / "slow.py", tmp_path / "right.py"]
    for file, seconds in zip(files, (100, 0), strict=True):
        file.write_text(RIGHT.format(seconds), encoding="utf-8")
    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 4.0)
        with pytest.raises(Interrupted):
            roster(files, ForkServer(PLAIN_CPU))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 60
