"""CUDA C++ compiled by the host's compiler, on the threads, barriers and copies of `cuda_host`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "cuda_host"
COMPILER = shutil.which("c++")
runs = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
)


def host_library(kernel: Path, entry: str, macros: Iterable[tuple[str, str]]) -> ctypes.CDLL:
    """The library of a kernel file, whose `run` (run.cpp) launches `entry`; it lies beside the
    file.

    Headers beside the file come before those of `cuda_host`.
    """
    library = kernel.with_suffix(".so")
    every = [*macros, ("KERNEL", f'"{kernel}"'), ("ENTRY", entry)]
    defines = [f"-D{name}={value}" for name, value in every]
    command = [str(COMPILER), *_FLAGS, f"-I{HOST}", *defines, str(HOST / "run.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    made = ctypes.CDLL(str(library))
    made.run.restype = ctypes.c_char_p
    return made
