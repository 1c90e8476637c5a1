"""The source files of a kernel: what its hash covers, and which files need each other."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class _Known:
    """Modules whose files have been resolved: all by their names, and by their folders the file,
    name and module of each that has a file."""

    modules: Mapping[str, ModuleType] = field(default_factory=dict)
    files: Mapping[str, Sequence[tuple[Path, str, ModuleType]]] = field(default_factory=dict)


_known = _Known()


def know_modules() -> None:
    """Resolve the files of the modules of this process, once for all of its forks."""
    modules = dict(sys.modules)
    files = defaultdict(list)
    for folder, file, name, module in _files(modules):
        files[folder].append((Path(folder, file), name, module))
    _known.modules, _known.files = modules, dict(files)


def modules_for(path: Path) -> dict[Path, ModuleType]:
    """The loaded modules that can be sources of this kernel file, by their files."""
    return _modules(path.parent, _COMPILER, _HELPERS, _HELPERS.parent)


def _modules(*folders: Path) -> dict[Path, ModuleType]:
    """The loaded modules of these folders, by their files, without symbolic links."""
    wanted, loaded, known = set(map(str, folders)), sys.modules, _known.modules
    found = {
        file: module
        for folder in wanted
        for file, name, module in _known.files.get(folder, ())
        if loaded.get(name) is module
    }
    new = {name: each for name, each in list(loaded.items()) if known.get(name) is not each}
    for folder, file, _, module in _files(new):
        if folder in wanted:
            found[Path(folder, file)] = module
    return found


def _files(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str, str, ModuleType]]:
    """Folder and name of the file of each module that has one, without symbolic links, its own
    name, and the module.

    There are thousands of modules, in few folders: each folder is resolved once.
    """
    real = cache(os.path.realpath)
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        # torch's pseudo-modules have a __file__ such as "_ops.py", which is not a path.
        if not file or not os.path.isabs(file):
            continue
        if os.path.islink(file):
            file = os.path.realpath(file)
        folder, last = os.path.split(file)
        yield real(folder), last, name, module


def is_installed(folder: Path) -> bool:
    """Whether the single files of other packages lie in this folder."""
    return str(folder) in _INSTALLED


def sources_of(imported: set[Path], path: Path) -> tuple[str, ...]:
    """The files that a kernel's source hash covers.

    They are the imported files of the kernel's folder and of kernels/, and the CUDA sources of the
    same name, or that those of its folder name in quotes, with what they include of the kernel's
    folder and of kernels/cuda.  For a kernel that imports the CUDA compiler (`verify.cuda`), add
    the compiler and the imported files of kernels/cuda.

    imported: the files of imported modules, and those that only a function will or can import.
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
    """What a kernel process imports of its kernels' folders when it launches them, and what no
    source hash covers (`named_imports`): old evidence would stand when such a file changes."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._known: set[str] = set()
        self._late: set[str] = set()
        self._modules = 0

    def loaded(self, path: Path, sources: Sequence[str]) -> None:
        """Take over the sources of a kernel file that has just been loaded."""
        if not is_installed(path.parent):
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
                " changes: import it at the top of the kernel's file, or by its name in"
                " importlib.import_module"
            )
