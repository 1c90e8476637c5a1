"""The program under an instrumenting tool (ConSan, FPSan): a kernel process whose Triton kernels
are built with instrumentation.

`python -m verify.sanitizers.instrumented_child SOCKET` connects to the judge's socket and answers
like any other kernel process.  Triton itself reads the mode from TRITON_INSTRUMENTATION_MODE.
Triton is looked at when a kernel file has loaded it: a run comes after that, and before the first
build.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from verify.cell.child import KernelProcess, serve_at
from verify.sanitizers import binaries, building, ledger


class InstrumentedKernelProcess(KernelProcess):
    """A kernel process that writes its launches and builds to the ledger."""

    watched = False

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self.watched and "triton" in sys.modules:
            _watch_triton()
            self.watched = True
        ledger.begin_run()
        return super()._run(message)


def _watch_triton() -> None:
    """What needs Triton: the builds, and the memory in which ConSan keeps its state."""
    from triton import set_allocator
    from triton.runtime import _allocation

    binaries.watch()
    building.watch_triton()
    # Triton 3.8 has memory of its own for that; before it must be given, by one or the other.
    set_allocator(_memory)
    if not hasattr(_allocation, "has_profile_allocator"):
        getattr(_allocation, "set_profile_allocator", set_allocator)(_memory)


def _memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory on the device for Triton's own use."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def main() -> None:
    """Serve at the socket that the command line names."""
    ledger.watch()
    serve_at(InstrumentedKernelProcess)


if __name__ == "__main__":
    main()
