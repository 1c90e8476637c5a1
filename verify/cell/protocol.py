"""The protocol between judge and cell: length-prefixed JSON and file descriptors on a Unix socket.

It is JSON because the judge must never execute anything that a kernel process sends.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct("<I")
_LIMIT = 64 << 20
_LEVELS = 64  # of objects and lists in a message, which functions that call themselves read
_SLICE = 0.5  # seconds between two calls of a Countdown's `counts`
_FIRST = 0.05  # seconds until the first one


class Closed(Exception):  # noqa: N818 - the other side's end, not an error of ours
    """The other side has closed the connection, or sent something that is not a message."""


class Countdown:
    """The time limit of one message, which can arrive in many parts.

    counts: called after a twentieth of a second, then about twice a second, with the seconds that
    have passed since the last call; returns how many of them count against the limit.  Without it
    all of them count.
    """

    def __init__(self, seconds: float, counts: Callable[[float], float] | None = None) -> None:
        self._left = seconds
        self._counts = counts
        self._slice = _FIRST
        self._seen = time.monotonic()

    def next(self) -> float:
        """Seconds to wait for the next part.  Raises TimeoutError when none are left."""
        now = time.monotonic()
        passed = now - self._seen
        if self._counts is None or passed >= min(self._slice, self._left):
            self._slice = _SLICE
            self._seen = now
            self._left -= passed if self._counts is None else self._counts(passed)
        if self._left <= 0:
            raise TimeoutError
        return self._left if self._counts is None else min(self._left, self._slice)


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message; `fds` are attached to its first byte.

    Raises Closed, and TimeoutError after the socket's timeout.
    """
    body = json.dumps(message).encode()
    data = _HEADER.pack(len(body)) + body
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else 0
        sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(
    sock: socket.socket, max_fds: int = 0, countdown: Countdown | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors.

    The complete message must arrive within the socket's timeout, or before `countdown` ends.
    Raises TimeoutError if it does not, and Closed at the end of the stream or for anything that is
    not a message.
    """
    timeout = sock.gettimeout()
    if countdown is None and timeout is not None:
        countdown = Countdown(timeout)
    try:
        return _receive(sock, max_fds, countdown)
    finally:
        sock.settimeout(timeout)


def _receive(
    sock: socket.socket, max_fds: int, countdown: Countdown | None
) -> tuple[dict[str, Any], list[int]]:
    head = b""
    fds: list[int] = []
    while len(head) < _HEADER.size:
        part, new = _part(sock, _HEADER.size - len(head), max_fds, countdown)
        fds.extend(new)
        head += part
    (length,) = _HEADER.unpack(head)
    if length > _LIMIT:
        raise Closed(f"a message of {length} bytes")
    body = bytearray()
    while len(body) < length:
        body += _part(sock, min(length - len(body), 1 << 20), 0, countdown)[0]
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Closed("not JSON") from error
    if not isinstance(message, dict):
        raise Closed("not an object")
    # Most messages have fewer brackets than levels are allowed.
    if body.count(b"[") + body.count(b"{") > _LEVELS and _levels(message) > _LEVELS:
        raise Closed(f"an object of more than {_LEVELS} levels")
    return message, fds


def _levels(message: dict[str, Any]) -> int:
    """How deeply objects and lists are nested, without a recursion."""
    levels = 0
    level: list[Any] = [message]
    while level:
        levels += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return levels


def _part(
    sock: socket.socket, size: int, max_fds: int, countdown: Countdown | None
) -> tuple[bytes, list[int]]:
    """The next bytes, at least one, and the descriptors that came with them."""
    fds: list[int] = []
    while True:
        if countdown is not None:
            sock.settimeout(countdown.next())
        try:
            if max_fds:
                part, fds, _, _ = socket.recv_fds(sock, size, max_fds)
            else:
                part = sock.recv(size)
        except ConnectionResetError:
            part = b""
        except TimeoutError:
            if countdown is None:
                raise
            continue  # the countdown decides whether the time is over
        if not part:
            raise Closed
        return part, fds
