"""Isolation: which of the judge's modules a kernel can import.

An obstacle for the careless - a kernel that calls the reference is no kernel - and no boundary:
code in a process can reach all that is in it.  The truth of a case is never there
(docs/security.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# What kernels declare themselves with.
import references.masks
import references.score_mods  # noqa: F401
import verify.problem
import verify.variant  # noqa: F401

_OURS = ("verify", "references")
_CELL = "verify.cell"
_PREFIXES = ("verify.variant.", "verify.cuda")  # open, whether this process has them or not


def _ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS


# What those three import, they need; this module is imported before any other that the judge has.
OPEN = frozenset(
    name for name in sys.modules if _ours(name) and not f"{name}.".startswith(f"{_CELL}.")
)


class _Closed(MetaPathFinder):
    """Refuses every module of the judge's that is not open to kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ImportError for a closed module; None leaves an open one to whoever finds it."""
        if _ours(fullname) and fullname not in OPEN and not fullname.startswith(_PREFIXES):
            raise ImportError(
                f"{fullname} is the judge's: a kernel may import verify.variant, verify.problem,"
                " verify.cuda, references.masks and references.score_mods",
                name=fullname,
            )
        return None


def close() -> None:
    """Close the judge's modules in this process: those that are loaded can no longer be had by
    name."""
    for name in [name for name in sys.modules if _ours(name) and name not in OPEN]:
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent in OPEN:
            vars(sys.modules[parent]).pop(last, None)
    sys.meta_path.insert(0, _Closed())
