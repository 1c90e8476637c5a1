"""Files of kinds: masks, score mods, storages and quantisations outside the tree (`--with FILE`).

VERIFY_WITH names the files, for every process of a command: a cell has to know a kind, too, and
`verify.problem` loads them there when it is imported, before the judge's modules are closed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from references.masks.base import KINDS as MASKS
from references.quantisation import KINDS as QUANTISATIONS
from references.score_mods.base import KINDS as SCORE_MODS
from verify.machine import outside_file
from verify.machine.outside_file import OutsideFileError
from verify.machine.settings import KIND_FILES
from verify.problem.storage.base import KINDS as STORAGES

_REGISTRIES: tuple[dict[str, Any], ...] = (MASKS, SCORE_MODS, STORAGES, QUANTISATIONS)
_used: dict[Path, ModuleType] = {}


def load() -> None:
    """Load the files that VERIFY_WITH names, each once in a process.

    A file is a module of the name of its stem.  Raises OutsideFileError if a file does not load,
    defines no kind, or has the name of another module.
    """
    for name in filter(None, os.environ.get(KIND_FILES, "").split(os.pathsep)):
        path = Path(name).resolve()
        if path not in _used:
            _used[path] = _loaded(path)


def used_files() -> tuple[Path, ...]:
    """The files that `load` has loaded."""
    return tuple(_used)


def forget() -> None:
    """Forget the files of kinds and what they defined: for tests, in a process that goes on."""
    for module in _used.values():
        _withdraw(module.__name__, [_without(kinds, module.__name__) for kinds in _REGISTRIES])
    _used.clear()


def _loaded(path: Path) -> ModuleType:
    name = path.stem  # kernels import it by that name
    if name in sys.modules:
        raise OutsideFileError(f"{path}: another module has the name {name}: rename the file")
    before = [dict(kinds) for kinds in _REGISTRIES]
    try:
        module = outside_file.load(path, name)
        if [dict(kinds) for kinds in _REGISTRIES] == before:
            raise OutsideFileError(
                f"{path} defines no mask, score mod, storage or quantisation"
                " (a file of oracles: --oracle)"
            )
    except OutsideFileError:
        _withdraw(name, before)
        raise
    return module


def _without(kinds: Mapping[str, Any], module: str) -> dict[str, Any]:
    return {word: kind for word, kind in kinds.items() if kind.__module__ != module}


def _withdraw(name: str, before: list[dict[str, Any]]) -> None:
    """Take a module's kinds back."""
    sys.modules.pop(name, None)
    for kinds, known in zip(_REGISTRIES, before, strict=True):
        kinds.clear()
        kinds.update(known)
