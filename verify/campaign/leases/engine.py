"""What a coordinator wants of an engine, and what an engine tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from verify.campaign.leases.executor import Spec
from verify.campaign.leases.requests import Answer, Check, Hello, Work


class Arrived(msgspec.Struct, frozen=True):
    """A worker is there."""

    worker: str


class Gone(msgspec.Struct, frozen=True):
    """A worker is no longer there."""

    worker: str


class Said(msgspec.Struct, frozen=True):
    """A worker's session has started, or `failed` says why it has not.

    usage: whether the command is at fault.  header: evidence that says who runs what.
    """

    worker: str
    host: str = ""
    name: str = ""
    pid: int = 0
    hello: Hello | None = None
    header: bytes = b""
    failed: str = ""
    usage: bool = False


class Checked(msgspec.Struct, frozen=True):
    """A worker has judged the control problem."""

    worker: str
    answer: Answer


class Worked(msgspec.Struct, frozen=True):
    """A worker has ended a lease."""

    worker: str
    lease: str
    answer: Answer
    evidence: bytes = b""


class Fails(msgspec.Struct, frozen=True):
    """A verdict of a lease under way fails; line: its evidence."""

    worker: str
    line: bytes


News = Arrived | Gone | Said | Checked | Worked | Fails
Told = Literal["stop", "known", "end"]


class EngineError(Exception):
    """An engine is lost, or cannot be used; the message says what to do, in one line."""


class Engine(Protocol):
    """Starts what a coordinator orders, and returns news.  No call waits for a worker's answer."""

    def news(self, seconds: float) -> Sequence[News]:
        """What has happened since the last call; waits that long for something to happen.  Raises
        EngineError."""

    def hello(self, worker: str, spec: Spec) -> None:
        """Start a worker's session."""

    def check(self, worker: str, request: Check) -> None:
        """Let a worker judge the control problem."""

    def work(self, worker: str, request: Work) -> None:
        """Give a worker a lease."""

    def tell(self, workers: Sequence[str], what: Told, test: str = "") -> None:
        """Tell the sessions of workers: begin no further case ("stop"); an example of a test is
        known; the campaign ends, and so does the session ("end")."""

    def close(self) -> None:
        """Let all workers go."""
