"""Processes that compile builds: what of the environment is as there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

COMPILES = "TRITON_INTERPRET", "0"
"""The variable of processes that compile builds: Triton must not interpret there."""


@contextmanager
def as_compiling() -> Iterator[None]:
    """In this process, what asks the environment is answered as where builds are compiled."""
    name, value = COMPILES
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
