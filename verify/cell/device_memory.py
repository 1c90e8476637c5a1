"""Device memory that a kernel keeps when its launch is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class DeviceMemory:
    """What the kernels of one life hold on the device, in bytes.

    held: of torch's allocator; the most that it was so far is `most`.  A kernel that keeps its last
    buffer for the next launch stops to grow when it has met the largest one; a leak does not.
    outside: what is taken on the device beside torch's pool; other processes change that too.
    """

    held: int = 0
    most: int = 0
    outside: int | None = None

    def watch(self, launch: Callable[[], None]) -> dict[str, int]:
        """Launch, and say by how much `most` and `outside` grew: "kept" and "taken", 0 or more."""
        before = torch.cuda.memory_allocated()
        launch()
        self.held += torch.cuda.memory_allocated() - before
        kept = max(self.held - self.most, 0)
        self.most += kept
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        taken = 0 if self.outside is None else max(outside - self.outside, 0)
        self.outside = outside
        return {"kept": kept, "taken": taken}
