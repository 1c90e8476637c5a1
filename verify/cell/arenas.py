"""Arenas of several kernels: each kernel file has its own.

What a kernel leaves in its process, such as a thread that still writes, can reach the buffers of
that process alone: no other kernel has its inputs or results there.
"""

from __future__ import annotations

from collections import OrderedDict

from verify.cell.arena import Arena

_MOST = 128 << 20
"""Bytes of all arenas that are kept: four of the largest that a message of several launches has.
To free an arena and take it again costs a page fault for every 4 KiB, twice."""


class Arenas:
    """Arenas by the path of a kernel file."""

    def __init__(self, most: int = _MOST) -> None:
        """most: bytes of all arenas.  Beyond it the least recently used ones lose their memory."""
        self._most = most
        self._arenas: OrderedDict[str, Arena] = OrderedDict()

    def of(self, path: str) -> Arena:
        """The arena of that file's kernels.  Another file's may lose its memory, and with it what a
        launch has left there."""
        if not self._arenas or path != next(reversed(self._arenas)):
            self._arenas.setdefault(path, Arena())
            self._arenas.move_to_end(path)
            self._free()
        return self._arenas[path]

    def drop(self, path: str) -> None:
        """Free the memory of that file's arena, if there is one, and forget it."""
        if path in self._arenas:
            self._arenas.pop(path).close()

    def close(self) -> None:
        """Free the memory of all."""
        for arena in self._arenas.values():
            arena.close()

    def _free(self) -> None:
        """Free the memory of the arenas that are too much, but not of the last one."""
        latest, *others = reversed(self._arenas.values())
        held = latest.capacity
        for arena in others:
            if held + arena.capacity > self._most:
                arena.close()
            held += arena.capacity
