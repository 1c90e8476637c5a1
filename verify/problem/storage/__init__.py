"""Storages: how tensors lie in memory, and what a kernel sees of them.  One file per kind.

A `Storage` is a frozen, hashable value with a one-line name that parses back
(`parse_storage(storage.name) == storage`).  It says which buffers a tensor of a shape takes, and
writes values into them.  Kernels list the kinds that they take in `Support.storages`, by their
words.

A new kind is one file in this folder: a subclass of `Storage` (see verify/problem/storage/base.py).
The files are imported by themselves, and a class that is made is registered; the problems that are
drawn, their names, the arena and the refusals of kernels without it follow.
"""

import importlib
import pkgutil

from verify.problem.storage.base import (
    Piece,
    ProblemError,
    Shape4,
    Storage,
    parse_storage,
    storage_kind,
    storage_words,
)
from verify.problem.storage.strided import EXPANSIONS, ORDERS, Layout
from verify.variant import STRIDED


def import_kinds() -> None:
    """Import every file of this folder, which registers the kinds that it defines."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


import_kinds()

__all__ = [
    "EXPANSIONS",
    "ORDERS",
    "STRIDED",
    "Layout",
    "Piece",
    "ProblemError",
    "Shape4",
    "Storage",
    "import_kinds",
    "parse_storage",
    "storage_kind",
    "storage_words",
]
