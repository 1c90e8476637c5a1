"""Another Triton than the installed one, for the processes that run kernels: VERIFY_TRITON.

The variable names a folder that holds the package `triton`.  It comes first on PYTHONPATH of every
process that loads a kernel file; the judge itself imports no Triton.  So a kernel that needs a
newer Triton, or a tool that only a newer one has, can be tried beside an installation that must
not change.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from verify.machine.settings import TRITON


def folder() -> Path | None:
    """The folder that VERIFY_TRITON names; None if it is not set."""
    named = os.environ.get(TRITON)
    return Path(named).resolve() if named else None


def on_path(variables: dict[str, str]) -> dict[str, str]:
    """Those environment variables, with that folder first on PYTHONPATH, if there is one."""
    other = folder()
    if other is None:
        return variables
    path = os.pathsep.join(filter(None, [str(other), variables.get("PYTHONPATH", "")]))
    return variables | {"PYTHONPATH": path}


def version() -> str | None:
    """The version of the Triton that kernels get, as its own source or else its installation says;
    None without one."""
    other = folder()
    if other is None:
        try:
            return importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return None
    try:
        text = (other / "triton" / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    said = re.search(r"""^__version__ = ["']([\w.+]+)["']""", text, re.MULTILINE)
    return said[1] if said else None


def release() -> tuple[int, int]:
    """Major and minor number of `version`; (0, 0) without a Triton."""
    numbers = re.match(r"(\d+)\.(\d+)", version() or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
