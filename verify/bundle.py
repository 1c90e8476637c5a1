"""Where the suite's own files stand, and how they are imported.  Standard library alone.

In a checkout `references/`, `kernels/` and `tests/` are top-level folders beside `verify/`. An
installed wheel holds one top-level package, `verify`; the same folders lie in `verify/_bundled/`,
with `conftest.py`, `constraints.txt` and `pyproject.toml`. ROOT is the folder that holds them in
either case. Their import names are the same in both (`references.masks`, `kernels.triton`): a
finder at the head of `sys.meta_path`, which `import verify` puts there, looks for them in ROOT.

`references` is always served.  `kernels` is also the name of other people's packages (Hugging
Face's is one), which a kernel on trial may import.  So it is served only in a process that called
`use_collection`: one that loads a file of the collection or a planted fault, or compiles a probe.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path, PurePosixPath

PACKAGE = Path(__file__).resolve().parent
"""The folder of the package `verify` itself."""

_BUNDLED = PACKAGE / "_bundled"

INSTALLED = _BUNDLED.is_dir()
"""Whether this is an installed wheel: no checkout, unpacked sdist or editable installation."""

ROOT = _BUNDLED if INSTALLED else PACKAGE.parent
"""The folder that holds references/, kernels/, tests/, conftest.py and pyproject.toml."""


class _Finder:
    """Finds the top-level packages `names` in ROOT, whatever sys.path holds under these names."""

    def __init__(self) -> None:
        self.names = {"references"}

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """The spec of a served package; None for every other module."""
        return PathFinder.find_spec(name, [str(ROOT)]) if name in self.names else None


_finder = _Finder()


def install() -> None:
    """Serve `references` in this process.  `import verify` calls it."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def published(path: str) -> str:
    """A file of the collection by its path in the checkout, another one's name: no report names a
    directory of this machine."""
    file = Path(path)
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name


def judge_sources() -> dict[str, Path]:
    """The judge's source files, references included, by the names that they have in a checkout."""
    every = chain.from_iterable(map(PACKAGE.rglob, ("*.py", "*.cu", "*.cuh")))
    own = (path for path in every if not path.is_relative_to(_BUNDLED))
    truth = (ROOT / "references").rglob("*.py")
    named = {PurePosixPath("verify", *path.relative_to(PACKAGE).parts): path for path in own}
    named |= {PurePosixPath(*path.relative_to(ROOT).parts): path for path in truth}
    return {str(name): named[name] for name in sorted(named)}


def use_collection() -> None:
    """From now on `import kernels` means the collection's package, in this process.

    Raises ImportError if another package of that name was imported before.
    """
    other = sys.modules.get("kernels")
    folders = [Path(place).resolve() for place in getattr(other, "__path__", ())]
    if other is not None and folders != [ROOT / "kernels"]:
        places = ", ".join(map(str, folders)) or "no folder"
        message = f"a package named kernels was imported before ({places})"
        raise ImportError(f"{message}; the collection's is {ROOT / 'kernels'}")
    _finder.names.add("kernels")


def for_children(variables: dict[str, str]) -> dict[str, str]:
    """Those environment variables, changed so that a child process imports this very `verify`.

    What is installed is found without help: the folder of all installed packages must not move to
    the head of the path.
    """
    if INSTALLED:
        return variables
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    return variables | {"PYTHONPATH": path}
