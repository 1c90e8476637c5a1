"""Closed imports: which of the judge's modules a kernel can import.

This stops accidents: a kernel that calls the reference is no kernel.  It is not a security
boundary, since code in a process can reach everything in that process.  The truth of a case is
never in a kernel process (docs/security.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The modules that kernel files need for their declarations.
import references.masks
import references.score_mods  # noqa: F401
import verify.problem
import verify.variant  # noqa: F401

_PACKAGES = ("verify", "references")
_CELL = "verify.cell"
# Open, even if this process has not imported them.
_PREFIXES = ("verify.variant.", "verify.cuda", "verify.adapters")


def _is_the_judges(name: str) -> bool:
    return name.partition(".")[0] in _PACKAGES


# The modules that those three import stay open.  This module is imported before the judge's others.
OPEN = frozenset(
    name for name in sys.modules if _is_the_judges(name) and not f"{name}.".startswith(f"{_CELL}.")
)


class _Closed(MetaPathFinder):
    """An import hook that refuses every module of the judge that is not open to kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for a closed module; None leaves any other to the next finder."""
        if _is_the_judges(fullname) and fullname not in OPEN and not fullname.startswith(_PREFIXES):
            raise ImportError(
                f"{fullname} is the judge's: a kernel may import verify.variant, verify.problem,"
                " verify.cuda, references.masks and references.score_mods",
                name=fullname,
            )
        return None


def close() -> None:
    """Close the judge's modules in this process: a kernel can no longer import them by name."""
    for name in [name for name in sys.modules if _is_the_judges(name) and name not in OPEN]:
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent in OPEN:
            vars(sys.modules[parent]).pop(last, None)
    sys.meta_path.insert(0, _Closed())
