"""Loading kernel files, inside a cell: declared variants, or a plain function that is made into
one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verify.bundle import PACKAGE, ROOT, use_collection
from verify.cell import plain_functions as plain
from verify.cell.plain_functions import Breach
from verify.variant import DeclarationError, Variant

__all__ = ["Breach", "Loaded", "line_of", "load", "sources_of"]

_COMPILER = PACKAGE / "cuda"
_HELPERS = ROOT / "kernels" / "cuda"


@dataclass(frozen=True)
class Loaded:
    """What a file holds; undeclared if its one variant was made from a plain function; sources: see
    `sources_of`.

    unheard: the same function under the other layouts, which a finding may ask; see `plain.twin`.
    """

    variants: tuple[Variant, ...]
    undeclared: bool
    sources: tuple[str, ...]
    interpreted: bool  # the file holds Triton kernels, and Triton interprets here
    unheard: tuple[Variant, ...] = ()


_WRAPPERS = 8  # decorators around a kernel that are looked through


def load(path: Path, package_root: str) -> Loaded:
    """Import a kernel file and return its variants.

    `VARIANT` or `VARIANTS` is taken as declared; else see `plain.find`.  Raises Breach when the
    file holds neither.
    """
    try:
        module = _import(path, Path(package_root))
    except DeclarationError as error:  # it says all that there is to say; a traceback would bury it
        raise Breach(f"{path.name}: {error}") from None
    files = (getattr(other, "__file__", None) for other in list(sys.modules.values()))
    # torch's own pseudo-modules call themselves "_ops.py" and the like, which is no path.
    real = (Path(file) for file in files if file and Path(file).is_absolute())
    sources = sources_of({file.resolve() for file in real}, path.resolve())
    interpreted = _interprets(module, path.resolve().parent)
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
        heard, *unheard = plain.variants(module, path, interpreted)
    except DeclarationError as error:
        raise Breach(f"{path.name}: {error}") from None
    return Loaded((heard,), True, sources, interpreted, tuple(unheard))


def line_of(error: BaseException, path: str) -> str:
    """The innermost line of that file that raised, as a SyntaxError tells it: " (mine.py, line 3)".

    Empty where none of its lines did.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f" ({Path(path).name}, line {lines[-1]})" if lines else ""


def _interprets(module: ModuleType, folder: Path) -> bool:
    """Whether Triton's interpreter runs a kernel that the module holds, or one beside it from which
    it imports."""
    beside = [
        other
        for other in list(sys.modules.values())
        if (file := getattr(other, "__file__", None))
        and Path(file).is_absolute()
        and Path(file).resolve().parent == folder
    ]
    return any(
        _is_interpreted(value) for each in (module, *beside) for value in list(vars(each).values())
    )


def _is_interpreted(value: object) -> bool:
    """Whether a value is an interpreted kernel, however often it is wrapped (Autotuner,
    Heuristics): each wrapper's `fn`."""
    for _ in range(_WRAPPERS):
        if type(value).__name__ == "InterpretedFunction":
            return True
        if not type(value).__module__.startswith("triton."):
            return False
        value = getattr(value, "fn", None)
    return False


def sources_of(imported: set[Path], path: Path) -> tuple[str, ...]:
    """The files that a kernel's hash covers, among those that its file imported.

    These are the files of its folder.  A CUDA kernel adds its .cu file, the compiler
    (`verify.cuda`), what it imports from kernels/cuda, and every header there.
    """
    beside = {file for file in imported if file.parent == path.parent}
    texts = {path.with_suffix(".cu")}
    if _COMPILER / "compile.py" in imported:
        texts |= {file for file in imported if file.parent in (_COMPILER, _HELPERS)}
        texts |= set(_HELPERS.glob("*.cuh"))
    return tuple(sorted(str(file) for file in beside | {text for text in texts if text.is_file()}))


def _import(path: Path, root: Path) -> Any:
    path = path.resolve()
    if path.is_relative_to(root / "kernels") or path.is_relative_to(root / "tests"):
        use_collection()
    if path.is_relative_to(root / "kernels"):
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    if not path.is_file():
        raise Breach(f"{path.name}: no such file")
    name = f"accused_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Breach(f"{path.name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
