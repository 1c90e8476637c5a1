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
import types

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


def _attention(*args, **kwargs):
    return _function(*args, **kwargs)


attention = _function
if isinstance(_function, types.FunctionType):
    attention = _attention
    attention.__wrapped__ = _function  # its signature and source are the function's

# The settings of the module, then those of the call.  Its other names are private here: among them
# are the Triton kernels by which the judge knows that an interpreter runs them.
for _name, _value in list(vars(_module).items()):
    if not _name.startswith("__"):
        globals()["_of_module_" + _name] = _value
for _name in ("LAYOUT", "DTYPES", "HEAD_DIMS", "MASKS", "GRADIENTS", "LIKE", "WITHIN"):
    if hasattr(_module, _name):
        globals()[_name] = getattr(_module, _name)
globals().update({settings!r})
'''


def stand_in(function: Callable[..., Any], settings: dict[str, Any]) -> Path:
    """Write the kernel file of a function, and return its path (in FOLDER).

    settings: LAYOUT, DTYPES, HEAD_DIMS, MASKS, GRADIENTS, LIKE, WITHIN, as a kernel file has them.
    Raises TypeError for a function that another process cannot import by file and name.
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
    """(file, module, qualified name) of a function or another callable.  Raises TypeError."""
    shown = getattr(function, "__qualname__", None) or f"an object of {type(function).__name__}"
    if not callable(function) or inspect.isclass(function):
        made = " an instance of it, or" if inspect.isclass(function) else ""
        raise TypeError(f"verify.check: {shown} is no function: pass{made} the path of a file")
    found = _named(function) or (None if inspect.isfunction(function) else _held(function))
    if found is None:
        how = "define it with def" if inspect.isfunction(function) else "bind it to a name"
        raise TypeError(
            f"verify.check: {shown} cannot be imported by name in the kernel's own process: {how},"
            " at the top level of a file, or pass the path of a kernel file"
        )
    return found


def _named(function: Any) -> tuple[Path, str, str] | None:
    """Where its own qualified name is; None if another object, or none, is there."""
    owner = getattr(function, "__self__", None)
    within = owner if inspect.isclass(owner) else function  # of the `apply` of a class
    name = str(getattr(within, "__qualname__", "<"))
    module = sys.modules.get(getattr(within, "__module__", None) or "")
    if "<" in name or module is None:
        return None
    named: Any = module
    for part in name.split("."):
        named = inspect.getattr_static(named, part, None)
    named = getattr(named, "__func__", named)
    if named is not within:
        return None
    if within is not function:
        name += f".{function.__name__}"
    return _importable(module, name)


def _held(value: object) -> tuple[Path, str, str] | None:
    """Where a module holds an object under a name of its top level, first the module of its class;
    None if none does."""
    first = sys.modules.get(type(value).__module__)
    for module in (first, *list(sys.modules.values())):
        for name, each in list(getattr(module, "__dict__", {}).items()):
            if each is value and (found := _importable(module, name)) is not None:
                return found
    return None


def _importable(module: Any, name: str) -> tuple[Path, str, str] | None:
    """The file, the module and the name, if there is such a file."""
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return None
    return Path(file).resolve(), module.__name__, name
