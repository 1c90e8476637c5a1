"""Builds: what can be compiled without a GPU, and what a compiler says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """What a compiler says that one kernel needs: registers per thread; shared memory per block,
    stack, spill stores and spill loads per thread, in bytes.  shared: static and dynamic, as the
    launch would ask for."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Build:
    """One binary of a variant: its name (config, dtype, head-dim bucket, mask kind...) and how to
    compile it without a GPU.

    compile() raises if it cannot be compiled, with the compiler's words.
    """

    name: str
    compile: Callable[[], Resources]
