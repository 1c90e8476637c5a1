"""The program that runs under ncu: a kernel process that tells ncu which launches to profile.

`python -m verify.profiling.child SOCKET` connects to the judge's socket and answers like any other
kernel process.  A run whose message says "profile" lies between cudaProfilerStart and
cudaProfilerStop, without the copies around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from verify.cell.child import KernelProcess, serve_at
from verify.cell.launching import launch


class ProfiledKernelProcess(KernelProcess):
    """A kernel process whose marked runs ncu sees."""

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        marked = message["device"] == "cuda" and message.get("profile")
        with self._on_device(message) as arena, _profiled() if marked else contextlib.nullcontext():
            launch(self.variants[message["variant"]], message, arena)
        return {}


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    serve_at(ProfiledKernelProcess)
