"""What a kernel's text says that it imports, wherever in it that stands.  Nothing is imported.

A kernel can import a file of its folder only when it is launched: in a function, or by a call of
importlib.  Its source hash covers such a file too, where the text tells which one it is: a
statement or a call with a literal name gives the file, and a call with a computed name can give
every Python file of the folder.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_BY_NAME = ("import_module", "__import__")
_BY_PATH = ("spec_from_file_location", "SourceFileLoader", "run_path", "run_module")

# The parts of a text that can name a module, or what imports one.
_TOLD_BY = (ast.Import, ast.ImportFrom, ast.Call, ast.alias, ast.Attribute, ast.Name)

Read = Callable[[Path], bytes]


def named_from(path: Path, read: Read = Path.read_bytes) -> set[Path]:
    """The files of a Python file's folder that it names in imports, and those that these files
    name."""
    return _followed(path, read)[0]


def possible_from(path: Path) -> set[Path]:
    """Every Python file of the folder if the file, or one that it names, computes the name of an
    import; else none."""
    if not _followed(path, Path.read_bytes)[1]:
        return set()
    files = path.parent.glob("*.py")
    return {file for file in files if file.is_file() and os.access(file, os.R_OK)} - {path}


def _followed(path: Path, read: Read) -> tuple[set[Path], bool]:
    """The files of `named_from`, and whether one of the texts computes a name."""
    found = {path}
    new = [path]
    computes = False
    while new:
        file = new.pop()
        try:
            imports = _Imports.of(file, read(file))
        except OSError:
            continue
        computes = computes or imports.computed
        named = set(imports.files(file)) - found
        found |= named
        new += named
    return found - {path}, computes


@dataclass(frozen=True)
class _Imports:
    """The imports of one text: dotted names of modules that it may import, cut at their dots, and
    whether it computes another name."""

    names: frozenset[tuple[str, ...]] = frozenset()
    computed: bool = False

    @staticmethod
    @lru_cache(maxsize=64)  # a load asks twice for each text
    def of(path: Path, text: bytes) -> _Imports:
        """Those of a text.  None in a text that does not parse."""
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _TOLD_BY)]
            called = list(_called(nodes, path.parent.name))
            names = {*_stated(nodes, path.parent.name), *(name for name, _ in called)}
            literal = {id(function) for _, function in called}
            return _Imports(frozenset(names), any(_computes(node, literal) for node in nodes))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _Imports()

    def files(self, path: Path) -> Iterator[Path]:
        """The files of that text's folder which the names mean."""
        folder = path.parent.parts
        for *packages, stem in self.names:
            file = path.with_name(f"{stem}.py")
            # A folder of kernels comes last in sys.path: `import math` is Python's.
            alone = not packages and stem not in sys.stdlib_module_names
            within = alone or (packages and tuple(packages) == folder[-len(packages) :])
            if within and file != path and file.is_file():
                yield file


def _stated(nodes: Sequence[ast.AST], folder: str) -> Iterator[tuple[str, ...]]:
    """The names in import statements; those of the text's own package begin with its folder."""
    for node in nodes:
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


def _called(nodes: Sequence[ast.AST], folder: str) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    """The literal names in calls such as importlib.import_module("name"), and what is called."""
    for node in nodes:
        if not (isinstance(node, ast.Call) and _name_of(node.func) in _BY_NAME and node.args):
            continue
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            name = first.value
            yield tuple((folder + name if name.startswith(".") else name).split(".")), node.func


def _computes(node: ast.AST, literal: set[int]) -> bool:
    """Whether a part of a text can import a module whose name the text does not tell: it mentions
    such a function, but does not call it with a literal name."""
    if isinstance(node, ast.alias):
        return node.asname is not None and node.name.rpartition(".")[2] in (*_BY_NAME, *_BY_PATH)
    return id(node) not in literal and _name_of(node) in (*_BY_NAME, *_BY_PATH)


def _name_of(node: ast.AST) -> str | None:
    """The last name of `name` or `module.name`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
