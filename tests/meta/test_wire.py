"""The wire between judge and cell: JSON objects and descriptors, and nothing that is executed."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from verify.cell.cell import ROOT
from verify.cell.wire import Closed, receive, send


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
