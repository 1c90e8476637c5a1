"""Device memory: what a kernel keeps after its launch, and what says that other processes left too
little of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class DeviceMemory:
    """Device memory that the kernels of one kernel process hold, in bytes.

    held: memory from torch's allocator; most: its maximum so far.  A kernel that keeps its last
    buffer for the next launch stops growing once it has met the largest one; a leak does not.
    outside: memory taken on the device outside torch's pool; other processes change it too.
    """

    held: int = 0
    most: int = 0
    outside: int | None = None

    def watch(self, launch: Callable[[], None]) -> dict[str, int]:
        """Launch; return by how many bytes `most` ("kept") and `outside` ("taken") grew, at
        least 0."""
        kept = self.kept(launch)
        return {"kept": kept, "taken": self.taken()}

    def kept(self, launch: Callable[[], None]) -> int:
        """Launch; return by how many bytes `most` grew, at least 0."""
        before = _allocated()
        launch()
        self.held += _allocated() - before
        kept = max(self.held - self.most, 0)
        self.most += kept
        return kept

    def taken(self) -> int:
        """By how many bytes `outside` has grown since it was last asked for, at least 0."""
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        taken = 0 if self.outside is None else max(outside - self.outside, 0)
        self.outside = outside
        return taken


def _allocated() -> int:
    """`torch.cuda.memory_allocated()`, which makes a sorted list of a hundred figures to pick one.
    It is asked twice a launch."""
    found = torch.cuda.memory_stats_as_nested_dict()
    return int(found["allocated_bytes"]["all"]["current"]) if found else 0


def exhausted(error: BaseException) -> bool:
    """Whether an exception says that memory ran out.

    torch, its CUDA calls, Triton and cuda-core each raise another type: only their texts agree.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "out of memory" in str(error).lower().replace("_", " ")


# What CUDA says to a process that asks for a GPU and gets no context there: another process has the
# GPU for itself, or NVIDIA's MPS has as many clients as it can have, or does not answer.
_NO_CONTEXT = (
    "busy or unavailable",
    "MPS client failed to connect",
    "call between the MPS server and the MPS client failed",
    "MPS server is not ready",
    "resources required to create MPS client have been exhausted",
    "resources required to support device connections have been exhausted",
)


def unavailable(error: BaseException) -> bool:
    """Whether an exception says that CUDA lets no further process use the device, which is the
    other processes' doing."""
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in _NO_CONTEXT)
