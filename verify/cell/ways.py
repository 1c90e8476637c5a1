"""Other ways to run a kernel once: with inputs that cannot be written, from a captured CUDA graph,
and while another device is current.

The judge names the way in its request and compares the results itself.  The reply says where a way
cannot be gone: one device only, a kernel that cannot be captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from verify.cell.arena import Slot, bits, negated, slots_from

READ_ONLY, GRAPH, OTHER_DEVICE = "read-only inputs", "graph", "other device"
SHARED = "shared inputs"  # of launches at the same time
DELAYS = "delays "  # and a seed; a way that only `verify.sanitizers.delays` knows
UNBUILT = "unbuilt"  # the status of its reply where a kernel does not compile with delays
GONE = "gone"  # in a reply: whether the run went the way that was asked for


def run(message: dict[str, Any], arena: Tensor, launch: Callable[[], None]) -> dict[str, Any]:
    """Run `launch`, which reads and writes the arena, the way that the message names."""
    slots = slots_from(message["slots"])
    way = message["way"]
    if way == READ_ONLY:
        with read_only(slots, arena):
            launch()
        return {GONE: True}
    if way == GRAPH:
        return replayed(slots, arena, launch)
    if way == OTHER_DEVICE:
        return elsewhere(launch)
    raise ValueError(f"unknown way {way!r}")


@contextlib.contextmanager
def read_only(slots: Sequence[Slot], arena: Tensor) -> Iterator[None]:
    """The pages of every input cannot be written: a kernel that writes one is ended by a signal.

    The arena lies in this machine's memory, on a page's start.  Redzones are longer than two pages,
    so no output shares a page with an input.
    """
    spans = [_pages(slot) for slot in slots if slot.role == "input" and slot.begin < slot.end]
    _protect(arena, spans, mmap.PROT_READ)
    try:
        yield
    finally:
        _protect(arena, spans, mmap.PROT_READ | mmap.PROT_WRITE)


def _pages(slot: Slot) -> tuple[int, int]:
    begin = slot.begin // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, -(-slot.end // mmap.PAGESIZE) * mmap.PAGESIZE


def _protect(arena: Tensor, spans: Sequence[tuple[int, int]], protection: int) -> None:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    for begin, end in spans:
        address = ctypes.c_void_p(arena.data_ptr() + begin)
        if mprotect(address, ctypes.c_size_t(end - begin), protection):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def replayed(slots: Sequence[Slot], arena: Tensor, launch: Callable[[], None]) -> dict[str, Any]:
    """Capture a launch while Q (in a backward: dO) is negated, and replay it with the case's own
    inputs, over poison.  If the capture fails, the process should end: torch's allocator can still
    take a capture for under way."""
    own = arena.clone()
    _negate(slots, arena)
    changed = arena.clone()
    launch()  # compiles the kernel, and allocates what it keeps
    torch.cuda.synchronize()
    arena.copy_(changed)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except Exception as error:
        return {GONE: False, "why": str(error).strip().partition("\n")[0][:300]}
    arena.copy_(own)
    graph.replay()
    torch.cuda.synchronize()  # before the graph and its memory go
    return {GONE: True}


def _negate(slots: Sequence[Slot], arena: Tensor) -> None:
    """Flip the sign of every element of dO, or of Q in a forward; of nothing if that is stored in
    pieces."""
    names = {slot.name: slot for slot in slots}
    slot = names.get("dout") or names.get("q")
    if slot is None or 0 in slot.shape:
        return
    view = slot.view(arena)
    # Each place once, where dimensions are expanded.
    once = view[tuple(slice(0, 1 if step == 0 else None) for step in view.stride())]
    bits(once).copy_(bits(negated(once)))


def elsewhere(launch: Callable[[], None]) -> dict[str, Any]:
    """Launch while another device than the arena's is current, if there is one."""
    devices = torch.cuda.device_count()
    here = torch.cuda.current_device()
    with torch.cuda.device((here + 1) % devices):
        launch()
        torch.cuda.synchronize()
    return {GONE: devices > 1}


class SharedInputs:
    """Replaces a launch's bytes: its inputs are those of the first launch, all else its own."""

    def __init__(self, slots: Sequence[Slot], first: Tensor, own: Tensor) -> None:
        self.device = own.device
        self._inputs = [slot for slot in slots if slot.role == "input"]
        self._first = first
        self._own = own

    def __getitem__(self, where: slice) -> Tensor:
        """Bytes of one buffer."""
        shared = any(slot.begin <= where.start <= where.stop <= slot.end for slot in self._inputs)
        return (self._first if shared else self._own)[where]

    @staticmethod
    def over(message: dict[str, Any], first: Tensor, own: Tensor) -> Tensor:
        """`own`, with the inputs of `first` if the message asks for it."""
        if message.get("way") != SHARED:
            return own
        # A launch needs only the device and slices of the bytes.
        return cast(Tensor, SharedInputs(slots_from(message["slots"]), first, own))
