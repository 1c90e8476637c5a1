"""Python files outside the tree, loaded into this process as modules: oracles (`--oracle FILE`) and
kinds of masks, score mods, storages and quantisations (`--with FILE`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class OutsideFileError(ValueError):
    """A file from outside the tree cannot be used; the message names it."""


def load(path: Path, name: str) -> ModuleType:
    """Run a file as the module `name`, and return the module.

    Raises OutsideFileError if the file does not exist, is no Python file, or does not load; then no
    module of that name is left.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OutsideFileError(f"{path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there, and others import it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise OutsideFileError(f"{path} does not load: {type(error).__name__}: {error}") from error
    return module
