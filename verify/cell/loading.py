"""Loads a kernel file in a cell: its declared variants, or a variant made of its plain function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.bundle import use_collection
from verify.cell import plain_functions as plain
from verify.cell.breach import Breach
from verify.cell.named_imports import named_from, possible_from
from verify.cell.sources import is_installed, modules_for, sources_of
from verify.variant import DeclarationError, Variant


@dataclass(frozen=True)
class Loaded:
    """The contents of a kernel file.

    undeclared: the variants were made from a plain function.  sources: see `sources_of`.  needed:
    the files that it imports; `sources` can have others that it may import when it is launched.
    twins: the same plain function in the other tensor layouts (`layout_twins.twin`), which a
    finding can try.
    """

    variants: tuple[Variant, ...]
    undeclared: bool
    sources: tuple[str, ...]
    needed: tuple[str, ...]
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
    modules = modules_for(real)
    imported = set(modules) | named_from(real)
    sources = sources_of(imported | _possible(real), real)
    needed = tuple(sorted(map(str, imported)))
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
        return Loaded(variants, False, sources, needed, interpreted)
    try:
        variants, twins = plain.variants(module, path, interpreted)
    except DeclarationError as error:
        raise Breach(f"{path.name}: {error}") from None
    return Loaded(variants, True, sources, needed, interpreted, twins)


def _possible(path: Path) -> set[Path]:
    """The files that the kernel may import by a name that its text computes."""
    return set() if is_installed(path.parent) else possible_from(path)


def line_of(error: BaseException, path: str) -> str:
    """The innermost line of the file in the traceback, in a SyntaxError's style:
    " (mine.py, line 3)".  Empty if no line of the file is in the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f" ({Path(path).name}, line {lines[-1]})" if lines else ""


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
