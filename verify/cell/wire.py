"""What judge and cell say to each other: length-prefixed JSON over a Unix socket, with file descriptors beside it.

JSON, because the judge must never execute anything that a kernel's process sends.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<I")
_LIMIT = 64 << 20


class Closed(Exception):  # noqa: N818 - the other side's end, not an error of ours
    """The other side is gone."""


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message; `fds` travel with its first byte.  Raises Closed."""
    body = json.dumps(message).encode()
    data = _HEADER.pack(len(body)) + body
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else 0
        sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors.  Raises Closed at the stream's end, TimeoutError past the socket's timeout."""
    head, fds = b"", []
    while len(head) < _HEADER.size:
        if max_fds:
            part, new, _, _ = socket.recv_fds(sock, _HEADER.size - len(head), max_fds)
            fds.extend(new)
        else:
            part = _recv(sock, _HEADER.size - len(head))
        if not part:
            raise Closed
        head += part
    (length,) = _HEADER.unpack(head)
    if length > _LIMIT:
        raise Closed(f"a message of {length} bytes")
    body = bytearray()
    while len(body) < length:
        part = _recv(sock, min(length - len(body), 1 << 20))
        if not part:
            raise Closed
        body += part
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Closed("not JSON") from error
    if not isinstance(message, dict):
        raise Closed("not an object")
    return message, fds


def _recv(sock: socket.socket, size: int) -> bytes:
    try:
        return sock.recv(size)
    except ConnectionResetError:
        return b""
