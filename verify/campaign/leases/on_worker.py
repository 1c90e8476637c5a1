"""What Dask runs in a worker's process: it hands orders to the session, and never runs a kernel.

A worker has one session at a time.  Its tasks run one after another.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec

from verify.campaign.leases.executor import Executor, SessionError, Spec
from verify.campaign.leases.requests import Answer, Request

_turn = threading.Lock()
_executor: Executor | None = None
_REQUEST = msgspec.json.Decoder(Request)


def topic(campaign: str) -> str:
    """The topic of a campaign's failing verdicts."""
    return f"verify-{campaign}"


def hello(spec: bytes) -> dict[str, Any]:
    """Start a session; returns the fields of `engine.Said`, the hello as JSON."""
    from distributed import get_worker

    global _executor
    worker = get_worker()
    wanted = msgspec.json.decode(spec, type=Spec)
    said: dict[str, Any] = {
        "host": socket.gethostname(),
        "name": str(worker.name),
        "pid": os.getpid(),
    }

    def failing(line: bytes) -> None:
        worker.log_event(topic(wanted.campaign), {"worker": worker.address, "line": line})

    with _turn:
        close()
        _executor = Executor(wanted, failing, Path(worker.local_directory))
        try:
            greeting = _executor.start()
        except SessionError as error:
            close()
            return {**said, "failed": str(error), "usage": error.usage}
        except OSError as error:
            close()
            return {**said, "failed": f"{type(error).__name__}: {error}"}
    return {**said, "hello": msgspec.json.encode(greeting), "header": _executor.header}


def ask(campaign: str, request: bytes) -> tuple[bytes, bytes]:
    """Ask the session; returns the answer as JSON, and the evidence, compressed."""
    with _turn:
        if _executor is None or _executor.spec.campaign != campaign:
            answer = Answer(errors=(("", "", "the worker has no session of this campaign"),))
            evidence = b""
        else:
            answer, evidence = _executor.ask(_REQUEST.decode(request))
    return msgspec.json.encode(answer), zlib.compress(evidence, 1)


async def tell(campaign: str, what: str, test: str) -> None:
    """Tell the session something, while it is at work: a coroutine runs beside a task."""
    executor = _executor
    if executor is not None and executor.spec.campaign == campaign:
        if what == "stop":
            executor.stop()
        elif what == "end":
            close()
        else:
            executor.known(test)


def close() -> None:
    """End the session."""
    global _executor
    if _executor is not None:
        _executor.close()
        _executor = None


atexit.register(close)
