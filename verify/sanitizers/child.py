"""The program that runs under the tool: a kernel process that is neither forked nor in an arena.

`python -m verify.sanitizers.child SOCKET` connects to the judge's socket and answers like any other
kernel process.  But every run gets separate allocations (`verify.cell.isolated_buffers`), and each
case with all its copies ends before the next begins.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import Tensor

from verify.cell.arena import slots_from
from verify.cell.child import KernelProcess, serve_at
from verify.cell.isolated_buffers import IsolatedBuffers
from verify.cell.launching import launch
from verify.machine.settings import WORKSPACES
from verify.sanitizers import ledger, scratch


class IsolatedKernelProcess(KernelProcess):
    """A kernel process that puts every buffer in its own allocation."""

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        ledger.begin_run()
        scratch.fill()
        variant = self.variants[message["variant"]]
        device = message["device"]
        poisoned = os.environ.get(WORKSPACES) == "poisoned"
        slots = slots_from(message["slots"])
        buffers = IsolatedBuffers(slots, self.host, device, poisoned=poisoned)
        try:
            # A launch needs only the device and slices of the arena's bytes; both work here.
            launch(variant, message, cast(Tensor, buffers))
        finally:
            try:
                if device == "cuda":
                    torch.cuda.synchronize()
                buffers.restore()
            except RuntimeError:
                self.poisoned = True
                raise
        return {}


def main() -> None:
    """Serve at the socket that the command line names."""
    # Memory that torch fills would count as initialised.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ledger.watch()
    serve_at(IsolatedKernelProcess)


if __name__ == "__main__":
    main()
