"""The protocol of judge and cell: JSON objects and descriptors, nothing that is executed."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verify.cell.process import ROOT
from verify.cell.protocol import Closed, Countdown, receive, send


def test_the_wire_executes_nothing(tmp_path: Path) -> None:
    """Messages are JSON objects: a pickle is a closed connection."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    body = pickle.dumps({"status": Bomb()})
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(len(body).to_bytes(4, "little") + body)
        with pytest.raises(Closed):
            receive(mine)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("levels", [64, 65, 900])
@pytest.mark.parametrize("bracket", ["[]", '{"x":'])
def test_a_message_is_not_deeper_than_its_readers_can_go(levels: int, bracket: str) -> None:
    """Functions that read it call themselves for each level."""
    inner = "[" * (levels - 1) + "]" * (levels - 1)
    if bracket != "[]":
        inner = '{"x":' * (levels - 1) + "1" + "}" * (levels - 1)
    body = f'{{"status": {inner}}}'.encode()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(len(body).to_bytes(4, "little") + body)
        if levels == 64:
            assert receive(mine)[0] == json.loads(body)
            return
        with pytest.raises(Closed, match="more than 64 levels"):
            receive(mine)


def test_the_wire_carries_messages_and_descriptors() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, (ROOT / "LICENSE").open("rb") as file:
        send(mine, {"op": "arena", "text": "é\n\ud800"}, [file.fileno()])
        message, fds = receive(theirs, 1)
        assert message == {"op": "arena", "text": "é\n\ud800"}
        assert os.fstat(fds[0]).st_ino == os.fstat(file.fileno()).st_ino
        os.close(fds[0])
        big = {"data": "x" * (1 << 16), "numbers": [float("inf"), -0.0]}
        send(theirs, big)
        assert receive(mine)[0] == json.loads(json.dumps(big))
        theirs.close()
        with pytest.raises(Closed):
            receive(mine)
        with pytest.raises(Closed):
            send(mine, big)


def test_a_message_that_drips_has_one_deadline_for_the_whole() -> None:
    mine, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall((1000).to_bytes(4, "little"))
        while not stop.wait(0.05):
            theirs.sendall(b" ")

    dripping = threading.Thread(target=drip)
    with mine, theirs:
        mine.settimeout(0.4)
        dripping.start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(mine)
        assert 0.3 < time.monotonic() - begun < 3
        assert mine.gettimeout() == 0.4, "the next message has as long"
        stop.set()
        dripping.join()


def test_a_countdown_counts_what_it_is_told_to() -> None:
    """The time of a compiler does not count for the kernel: the wait continues until the rest is
    used up."""
    mine, theirs = socket.socketpair()
    asked: list[float] = []

    def counts(seconds: float) -> float:
        asked.append(seconds)
        return 0.0 if len(asked) < 3 else seconds

    with mine, theirs:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(mine, countdown=Countdown(0.2, counts))
        assert len(asked) >= 3
        assert time.monotonic() - begun > 0.4  # twice the limit: half of it counts for nothing


def test_whoever_watches_can_end_the_wait() -> None:
    def counts(seconds: float) -> float:
        raise MemoryError

    mine, theirs = socket.socketpair()
    with mine, theirs, pytest.raises(MemoryError):
        receive(mine, countdown=Countdown(0.1, counts))
