"""The source files of a kernel: what its hash covers, and which files need each other."""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from verify.bundle import PACKAGE, ROOT
from verify.cell.breach import Breach
from verify.cuda.includes import included

_COMPILER = PACKAGE / "cuda"
_HELPERS = ROOT / "kernels" / "cuda"
# Other packages' single files lie in these folders.
_INSTALLED = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
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

    imported: the files of imported modules, and those that only a function will import.
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


class LateImports:
    """What a kernel process imports of its kernels' folders when it launches them: nothing has told
    the judge that such a file is a source, so that old evidence would stand when it changes."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._known: set[str] = set()
        self._late: set[str] = set()
        self._modules = 0

    def loaded(self, path: Path, sources: Sequence[str]) -> None:
        """Take over the sources of a kernel file that has just been loaded."""
        if str(path.parent) not in _INSTALLED:
            self._folders.add(path.parent)
        self._known |= {*sources, *map(str, _modules(*self._folders))}
        self._modules = len(sys.modules)

    def check(self) -> None:
        """Raise Breach if a launch has imported another file, at this launch or before."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._late |= set(map(str, _modules(*self._folders))) - self._known
        if self._late:
            names = ", ".join(sorted(os.path.basename(file) for file in self._late))
            raise Breach(
                f"imports {names} only when it is launched, so that nobody notices when that file"
                " changes: import it at the top of the kernel's file"
            )


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
        names = set(_named(tree, path.parent.name))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    folder = path.parent.parts
    found = set()
    for *packages, stem in names:
        file = path.with_name(f"{stem}.py")
        # A folder of kernels comes last in sys.path: `import math` is Python's.
        alone = not packages and stem not in sys.stdlib_module_names
        within = alone or (packages and tuple(packages) == folder[-len(packages) :])
        if within and file != path and file.is_file():
            found.add(file)
    return found


def _named(tree: ast.Module, folder: str) -> Iterator[tuple[str, ...]]:
    """The dotted names of modules that a text may import, cut at their dots; those of its own
    package begin with its folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            package = tuple(node.module.split(".")) if node.module else ()
            package = (folder, *package) if node.level else package
            if node.module:
                yield package
            for alias in node.names:  # a module of the package, or something in it
                yield (*package, alias.name)
