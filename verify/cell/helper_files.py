"""Helper files: Python files beside kernels that are no kernels.

A shell's `folder/*.py` names a package's __init__.py and the files that its kernels import.  They
declare no kernel, and the report lists them as such.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verify.cell.process import Reply

DECLARES = re.compile(r"^VARIANTS?\b", re.MULTILINE)
_IN_NO_PACKAGE = "ImportError: attempted relative import with no known parent package"
_MOST_NAMED = 3  # importing kernels in a reason


@dataclass(frozen=True)
class Unloadable:
    """A file that does not load, or is not to be judged, and why.

    message: its first line says what is wrong and where; the others are Python's traceback or the
    process's output.
    """

    ref: str
    path: str
    message: str

    @property
    def line(self) -> str:
        """The file, and why it does not load, in one line."""
        return f"{self.ref} does not load: {self.message.partition(chr(10))[0]}"


def declares_nothing(reply: Reply, path: Path) -> bool:
    """Whether a file that was not loaded has no declaration, and no function that can be judged
    without one.

    A package's __init__.py often imports from its package, of which a single file is no part.
    """
    if reply.data.get("undeclared") is True:
        return True
    init = path.name == "__init__.py" and reply.message == _IN_NO_PACKAGE
    if not (init or reply.status == "breach"):
        return False
    return DECLARES.search(path.read_text(encoding="utf-8", errors="replace")) is None


def reasons(
    undeclared: Sequence[Unloadable], needed: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Why files are no kernels, by their refs; a file that is not among these should be one.

    needed: the paths that each other given file imports, by its ref.  Without another file, the
    file itself is meant.
    """
    found = {}
    for file in undeclared if needed else ():
        importing = [ref for ref, paths in needed.items() if file.path in paths]
        if Path(file.path).name == "__init__.py":
            found[file.ref] = "no kernel: a package's __init__.py"
        elif importing:
            found[file.ref] = f"no kernel: imported by {_listed(importing)}"
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
