"""The source files of a kernel: what its hash covers, and which files need each other."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from verify.bundle import PACKAGE, ROOT
from verify.cuda.includes import included

_COMPILER = PACKAGE / "cuda"
_HELPERS = ROOT / "kernels" / "cuda"
_CUDA_SOURCE = re.compile(rb"""["']([\w./-]+\.cu)["']""")


def modules_for(path: Path) -> dict[Path, ModuleType]:
    """The loaded modules that can be sources of this kernel file, by their files."""
    return _modules(path.parent, _COMPILER, _HELPERS, _HELPERS.parent)


def _modules(*folders: Path) -> dict[Path, ModuleType]:
    """The loaded modules of these folders, by their files, without symbolic links.

    There are thousands of modules, in few folders: each folder is resolved once.
    """
    wanted, real, found = set(map(str, folders)), cache(os.path.realpath), {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # torch's pseudo-modules have a __file__ such as "_ops.py", which is not a path.
        if not file or not os.path.isabs(file):
            continue
        if os.path.islink(file):
            file = os.path.realpath(file)
        folder, name = os.path.split(file)
        if real(folder) in wanted:
            found[Path(real(folder), name)] = module
    return found


def sources_of(imported: set[Path], path: Path) -> tuple[str, ...]:
    """The files that a kernel's source hash covers.

    They are the imported files of the kernel's folder and of kernels/, and the CUDA sources of the
    same name, or that those of its folder name in quotes, with what they include of the kernel's
    folder and of kernels/cuda.  For a kernel that imports the CUDA compiler (`verify.cuda`), add
    the compiler and the imported files of kernels/cuda.
    """
    # A module can name anything as its file: a pipe would never end.
    beside = {file for file in imported | {path} if file.parent == path.parent and file.is_file()}
    found = {file for file in imported if file.parent in (path.parent, _HELPERS.parent)}
    if _COMPILER / "compile.py" in imported:
        found |= {file for file in imported if file.parent in (_COMPILER, _HELPERS)}
    named = {name.decode() for file in beside for name in _CUDA_SOURCE.findall(file.read_bytes())}
    for unit in (path.with_suffix(".cu"), *(path.parent / name for name in named)):
        if unit.is_file():
            found |= {text.path for text in included(unit, (path.parent, _HELPERS))}
    return tuple(sorted(map(str, found)))


def named_from(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> set[Path]:
    """The files of a Python file's folder that its import statements name, wherever in it they
    stand, and those that these files name.  Nothing is imported."""
    found = {path}
    new = [path]
    while new:
        file = new.pop()
        try:
            named = _named_in(file, read(file)) - found
        except OSError:
            continue
        found |= named
        new += named
    return found - {path}


def _named_in(path: Path, text: bytes) -> set[Path]:
    """The files that these statements of one file name.  None in a text that does not parse."""
    try:
        tree = ast.parse(text)
        names = set(_named(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    folder = path.parent.parts
    found = set()
    for *packages, stem in names:
        file = path.with_name(f"{stem}.py")
        within = not packages or tuple(packages) == folder[-len(packages) :]
        if within and file != path and file.is_file():
            found.add(file)
    return found


def _named(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """The dotted names of modules that a text may import, cut at their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            package = tuple(node.module.split(".")) if node.module else ()
            if package:
                yield package
            for alias in node.names:  # a module of the package, or something in it
                yield (*package, alias.name)
