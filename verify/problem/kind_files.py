"""Files of kinds: masks, score mods and storages that stand outside the tree (`--with FILE`).

VERIFY_WITH names the files, for every process of a command: a cell has to know a kind, too, and
`verify.problem` loads them there when it is imported, before the judge's modules are closed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from references.masks.base import KINDS as MASKS
from references.score_mods.base import KINDS as SCORE_MODS
from verify.machine.settings import KIND_FILES
from verify.problem.storage.base import KINDS as STORAGES

_REGISTRIES: tuple[dict[str, Any], ...] = (MASKS, SCORE_MODS, STORAGES)
_used: dict[Path, ModuleType] = {}


class KindFileError(ValueError):
    """A file of kinds cannot be used; the message names it."""


def load() -> None:
    """Load the files that VERIFY_WITH names, each once in a process.

    A file is a module of the name of its stem.  Raises KindFileError if a file does not load,
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
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise KindFileError(f"{path}: no such Python file")
    if spec.name in sys.modules:
        raise KindFileError(f"{path}: another module has the name {spec.name}: rename the file")
    before = [dict(kinds) for kinds in _REGISTRIES]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses, and for kernels that import it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _withdraw(spec.name, before)
        raise KindFileError(f"{path} does not load: {type(error).__name__}: {error}") from error
    if [dict(kinds) for kinds in _REGISTRIES] == before:
        _withdraw(spec.name, before)
        raise KindFileError(
            f"{path} defines no mask, score mod or storage (a file of oracles: --oracle)"
        )
    return module


def _without(kinds: Mapping[str, Any], module: str) -> dict[str, Any]:
    return {word: kind for word, kind in kinds.items() if kind.__module__ != module}


def _withdraw(name: str, before: list[dict[str, Any]]) -> None:
    """Take a module's kinds back."""
    sys.modules.pop(name, None)
    for kinds, known in zip(_REGISTRIES, before, strict=True):
        kinds.clear()
        kinds.update(known)
