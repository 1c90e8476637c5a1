"""Loads a kernel file in a cell: its declared variants, or a variant made of its plain function."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from verify.bundle import PACKAGE, ROOT, use_collection
from verify.cell import plain_functions as plain
from verify.cell.breach import Breach
from verify.cuda.includes import included
from verify.variant import DeclarationError, Variant

__all__ = ["Breach", "Loaded", "line_of", "load", "sources_of"]

_COMPILER = PACKAGE / "cuda"
_HELPERS = ROOT / "kernels" / "cuda"
_CUDA_SOURCE = re.compile(rb"""["']([\w./-]+\.cu)["']""")


@dataclass(frozen=True)
class Loaded:
    """The contents of a kernel file.

    undeclared: the variants were made from a plain function.  sources: see `sources_of`.
    twins: the same plain function in the other tensor layouts (`layout_twins.twin`), which a
    finding can try.
    """

    variants: tuple[Variant, ...]
    undeclared: bool
    sources: tuple[str, ...]
    interpreted: bool  # the file holds Triton kernels, and Triton's interpreter runs them
    twins: tuple[Variant, ...] = ()


_WRAPPERS = 8  # nested decorators around a kernel that are searched


def load(path: Path, package_root: str) -> Loaded:
    """Import a kernel file and return its variants.

    They come from `VARIANT` or `VARIANTS`, or else from a plain function (`plain.find`).  Raises
    Breach when the file holds neither.
    """
    try:
        module = _import(path, Path(package_root))
    except DeclarationError as error:  # its message is complete; a traceback would hide it
        raise Breach(f"{path.name}: {error}") from None
    real = path.resolve()  # a link's variants are called by the link's name
    modules = _modules(real.parent, _COMPILER, _HELPERS, _HELPERS.parent)
    sources = sources_of(set(modules), real)
    local = (other for file, other in modules.items() if file.parent == real.parent)
    interpreted = any(
        _is_interpreted(value) for each in (module, *local) for value in list(vars(each).values())
    )
    declared = getattr(module, "VARIANTS", None)
    declared = [module.VARIANT] if declared is None and hasattr(module, "VARIANT") else declared
    if declared is not None:
        variants = tuple(declared)
        if not variants or not all(isinstance(variant, Variant) for variant in variants):
            raise Breach(
                f"{path.name}: VARIANT must be a verify.variant.Variant, VARIANTS a list of them"
            )
        return Loaded(variants, False, sources, interpreted)
    try:
        variants, twins = plain.variants(module, path, interpreted)
    except DeclarationError as error:
        raise Breach(f"{path.name}: {error}") from None
    return Loaded(variants, True, sources, interpreted, twins)


def line_of(error: BaseException, path: str) -> str:
    """The innermost line of the file in the traceback, in a SyntaxError's style:
    " (mine.py, line 3)".  Empty if no line of the file is in the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f" ({Path(path).name}, line {lines[-1]})" if lines else ""


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


def _is_interpreted(value: object) -> bool:
    """Whether a value is an interpreted kernel, possibly inside wrappers (Autotuner, Heuristics),
    whose attribute `fn` holds the inner one."""
    for _ in range(_WRAPPERS):
        if type(value).__name__ == "InterpretedFunction":
            return True
        if not type(value).__module__.startswith("triton."):
            return False
        value = getattr(value, "fn", None)
    return False


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


def _import(path: Path, root: Path) -> Any:
    path = path.resolve()
    if path.is_relative_to(root / "kernels") or path.is_relative_to(root / "tests"):
        use_collection()
    if path.is_relative_to(root / "kernels"):
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    if not path.is_file():
        raise Breach(f"{path.name}: no such file")
    name = f"kernel_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Breach(f"{path.name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
