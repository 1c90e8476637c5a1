"""CUDA C++ compiled by the host's compiler, on the threads, barriers and copies of `cuda_host`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "cuda_host"
COMPILER = shutil.which("c++")
runs = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
_FLAGS = (
    "-std=c++17",
    "-Og",  # compiles in three quarters of the time of -O1; its code is as fast
    "-ffp-contract=off",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
)
# A process loads many builds: else they would share constants of the same name, such as a tile's
# width, and a later build would read the first one's.
_LIBRARY = ("-shared", "-fno-gnu-unique")


def host_library(kernel: Path, entry: str, macros: Iterable[tuple[str, str]]) -> ctypes.CDLL:
    """The library of a kernel file, whose `run` (run.cpp) launches `entry`; it lies beside the
    file.

    Headers beside the file come before those of `cuda_host`.
    """
    return opened(compiled(kernel, entry, macros))


def compiled(
    kernel: Path,
    entry: str,
    macros: Iterable[tuple[str, str]],
    options: Sequence[str] = (),
    *,
    quiet: bool = False,
) -> Path:
    """The file of that library, not opened yet.

    options: further ones of the compiler; quiet: what it says is not shown.  Raises
    subprocess.CalledProcessError if it refuses the source.
    """
    library = kernel.with_suffix(".so")
    every = [*macros, ("KERNEL", f'"{kernel}"'), ("ENTRY", entry)]
    defines = [f"-D{name}={value}" for name, value in every]
    first = ["-include", str(Path(_standard_headers().name) / "standard.h")]
    command = [str(COMPILER), *_FLAGS, *_LIBRARY, f"-I{HOST}", *first, *defines, *options]
    said = subprocess.DEVNULL if quiet else None
    subprocess.run([*command, str(HOST / "run.cpp"), "-o", str(library)], check=True, stderr=said)
    return library


def opened(library: Path) -> ctypes.CDLL:
    """The library in that file."""
    made = ctypes.CDLL(str(library))
    made.run.restype = ctypes.c_char_p
    return made


@cache
def _standard_headers() -> tempfile.TemporaryDirectory[str]:
    """A folder with standard.h and its precompiled form, which takes a sixth of a kernel's time
    off; a compiler that cannot use the latter reads the former."""
    folder = tempfile.TemporaryDirectory(prefix="cuda-host-")
    # A file that does not ask to be read once, as the main file of a compilation must not.
    header = Path(folder.name) / "standard.h"
    header.write_text(f'#include "{HOST / "standard.h"}"\n', encoding="utf-8")
    command = [str(COMPILER), *_FLAGS, "-x", "c++-header", str(header)]
    subprocess.run([*command, "-o", f"{header}.gch"], check=True)
    return folder
