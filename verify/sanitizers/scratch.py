"""Memory that Triton asks for on its own behalf, filled before a launch.

A descriptor that a kernel makes goes into such memory by an atomic exchange
(tensormap.cp_fenceproxy; in SASS ATOMG.EXCH, whose old value goes to RZ).  initcheck counts it as a
read of what nothing has written: 32 records of 4 bytes for each descriptor of each program.  A
kernel has no other way to this memory, so that filling it hides no fault of a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

_MODULE = "triton.runtime._allocation"  # Triton 3.6 and 3.7 look there for the allocator


class Filling:
    """What stands for Triton's variable that holds the allocator: buffers come filled."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def get(self) -> Callable[[int, int, int | None], Any]:
        """The allocator that a launch calls."""
        return partial(_filled, self._variable.get())

    def set(self, allocator: Any) -> Any:
        """Set the allocator, as `triton.set_allocator` does."""
        return self._variable.set(allocator)


def fill() -> None:
    """From now on fill what Triton's allocator gives, if Triton is loaded; no more than once."""
    module: Any = sys.modules.get(_MODULE)
    if module is not None and not isinstance(module._allocator, Filling):
        module._allocator = Filling(module._allocator)


def _filled(allocator: Any, size: int, alignment: int, stream: int | None) -> Any:
    buffer = allocator(size, alignment, stream)
    if isinstance(buffer, Tensor):
        buffer.zero_()
    return buffer
