"""A kernel file for a function of somebody's module: it imports the function by file and name."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(".verify-checks")
"""Beside .verify, which holds the evidence and is closed to kernel processes."""

_TEXT = '''"""Made by verify.check for {name} of {file}."""

import importlib
import importlib.util
import os
import sys

FILE, MODULE, NAME, PATH = {file!r}, {module!r}, {name!r}, {path!r}
SHA256 = {digest!r}  # of FILE when the check began: another source is another kernel

sys.path += [folder for folder in PATH if folder not in sys.path]
_module = None
if MODULE != "__main__":
    try:
        _module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name not in (MODULE, MODULE.partition(".")[0]):
            raise
if _module is None or os.path.realpath(_module.__file__ or "") != FILE:
    _spec = importlib.util.spec_from_file_location("checked_module", FILE)
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["checked_module"] = _module
    _spec.loader.exec_module(_module)

_function = _module
for _part in NAME.split("."):
    _function = getattr(_function, _part)
_function = getattr(_function, "attention", _function)  # of a test by verify.checked


def attention(*args, **kwargs):
    return _function(*args, **kwargs)


attention.__wrapped__ = _function  # its signature and source are the function's

# The settings of the module, then those of the call.  Its other names are private here: among them
# are the Triton kernels by which the judge knows that an interpreter runs them.
for _name, _value in list(vars(_module).items()):
    if not _name.startswith("__"):
        globals()["_of_module_" + _name] = _value
for _name in ("LAYOUT", "DTYPES", "HEAD_DIMS", "MASKS", "GRADIENTS", "LIKE"):
    if hasattr(_module, _name):
        globals()[_name] = getattr(_module, _name)
globals().update({settings!r})
'''


def stand_in(function: Callable[..., Any], settings: dict[str, Any]) -> Path:
    """Write the kernel file of a function, and return its path (in FOLDER).

    settings: LAYOUT, DTYPES, HEAD_DIMS, MASKS, GRADIENTS, LIKE, as a kernel file has them.  Raises
    TypeError for a function that another process cannot import by file and name.
    """
    file, module, name = _origin(function)
    key = hashlib.sha256(repr((str(file), name, settings)).encode()).hexdigest()[:8]
    plain = "".join(letter if letter.isalnum() else "_" for letter in f"{file.stem}_{name}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
    target = FOLDER / f"{plain}_{key}.py"
    text = _TEXT.format(
        file=str(file),
        module=module,
        name=name,
        path=[str(Path(folder).resolve()) for folder in sys.path if folder],
        digest=hashlib.sha256(file.read_bytes()).hexdigest(),
        settings=settings,
    )
    target.write_text(text, encoding="utf-8")
    return target


def _origin(function: Callable[..., Any]) -> tuple[Path, str, str]:
    """(file, module, qualified name) of a function.  Raises TypeError."""
    shown = getattr(function, "__qualname__", None) or repr(function)
    advice = (
        f"verify.check: {shown} cannot be imported by name in the kernel's own process: define it"
        " with def, at the top level of a file, or pass the path of a kernel file"
    )
    name = getattr(function, "__qualname__", "<")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not callable(function) or "<" in name or module is None or file is None:
        raise TypeError(advice)
    named: Any = module
    for part in name.split("."):
        named = inspect.getattr_static(named, part, None)
    named = getattr(named, "__func__", named)
    if named is not function or not Path(file).is_file():
        raise TypeError(advice)
    return Path(file).resolve(), module.__name__, name
