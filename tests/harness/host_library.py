"""CUDA C++ compiled by the host's compiler, on the threads, barriers and copies of `cuda_host`."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.harness.host_compiler import COMPILER, MISSING, HostCompiler

HOST = Path(__file__).parent / "cuda_host"
runs = pytest.mark.skipif(COMPILER is None, reason=MISSING)
_FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
)


def host_library(
    kernel: Path,
    entry: str,
    macros: Iterable[tuple[str, str]],
    compiler: HostCompiler | None = COMPILER,
) -> ctypes.CDLL:
    """The library of a kernel file, whose `run` (run.cpp) launches `entry`; it lies beside the
    file.

    Headers beside the file come before those of `cuda_host`.
    """
    library = opened(compiled(kernel, entry, macros, compiler=compiler), compiler)
    library.run.restype = ctypes.c_char_p
    return library


def compiled(
    kernel: Path,
    entry: str,
    macros: Iterable[tuple[str, str]],
    options: Sequence[str] = (),
    *,
    quiet: bool = False,
    compiler: HostCompiler | None = COMPILER,
) -> Path:
    """The file of that library, not opened yet.

    options: further ones of the compiler; quiet: what it says is not shown.  Raises
    subprocess.CalledProcessError if it refuses the source, RuntimeError if there is no compiler.
    """
    library = kernel.with_suffix(".so")
    every = [*macros, ("KERNEL", f'"{kernel}"'), ("ENTRY", entry)]
    defines = [f"-D{name}={value}" for name, value in every]
    compile_library(HOST / "run.cpp", library, [*defines, *options], quiet=quiet, compiler=compiler)
    return library


def compile_library(
    program: Path,
    library: Path,
    options: Sequence[str],
    *,
    quiet: bool = False,
    compiler: HostCompiler | None = COMPILER,
) -> None:
    """Compile a program on the headers of `cuda_host`; raises as `compiled`."""
    if compiler is None:
        raise RuntimeError(MISSING)
    others = tuple(option for option in options if not option.startswith("-D"))
    folder = _standard_headers(compiler, others)
    first = ["-include", str(Path(folder.name) / "standard.h")]
    flags = [*_FLAGS, f"-I{HOST}", *first, *options]
    compiler.library(program, library, flags, quiet=quiet)


def opened(library: Path, compiler: HostCompiler | None = COMPILER) -> ctypes.CDLL:
    """The library in that file."""
    if compiler is None:
        raise RuntimeError(MISSING)
    return compiler.open(library)


@cache
def _standard_headers(
    compiler: HostCompiler, options: tuple[str, ...]
) -> tempfile.TemporaryDirectory[str]:
    """A folder with standard.h and its precompiled form, which takes a sixth of a kernel's time
    off; a compiler that cannot use the latter reads the former.

    options: Zig's compiler refuses a form that was made with others.
    """
    folder = tempfile.TemporaryDirectory(prefix="cuda-host-")
    # A file that does not ask to be read once, as the main file of a compilation must not.
    header = Path(folder.name) / "standard.h"
    header.write_text(f'#include "{HOST / "standard.h"}"\n', encoding="utf-8")
    flags = [*_FLAGS, *options, "-x", "c++-header"]
    compiler.compile(header, header.with_name("standard.h.gch"), flags, quiet=False)
    return folder
