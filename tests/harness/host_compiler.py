"""The C++ compiler of the host builds: the machine's own, or Zig's from PyPI (package ziglang)
where there is none."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MISSING = "no C++ compiler: install one, or ziglang from PyPI (dependency group host-compiler)"
# Zig builds its C++ library from source if a program links against it: 70 s once for each cache.
# Nothing here needs it: its templates are in the headers, which then must not throw; a check in
# them that fails aborts; and what is left, such as operator new, torch has brought with it.
_WITHOUT_LIBRARY = ("-fno-exceptions", "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()")
_RUNTIME = "libstdc++.so.6"


@dataclass(frozen=True)
class HostCompiler:
    """A compiler of C++.

    command: its first words.  zig: whether it is Zig's, which is clang.  unique: whether it makes
    variables unique in a process, unless it is told not to.
    """

    command: tuple[str, ...]
    zig: bool = False
    unique: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Those that this compiler needs beside the common ones."""
        if self.zig:  # which by default looks for undefined behaviour, and wants a library for it
            return (*_WITHOUT_LIBRARY, "-O1", "-fno-sanitize=undefined")
        # -Og compiles in three quarters of the time of -O1; its code is as fast
        return ("-Og", "-fno-gnu-unique") if self.unique else ("-Og",)

    def compile(self, source: Path, output: Path, options: Sequence[str], *, quiet: bool) -> None:
        """Compile a source, as the options say; quiet: what the compiler says is not shown.

        Raises subprocess.CalledProcessError if it refuses the source.
        """
        command = [*self.command, *self.flags, *options, str(source), "-o", str(output)]
        self._run(command, quiet=quiet)

    def library(self, source: Path, output: Path, options: Sequence[str], *, quiet: bool) -> None:
        """Compile a source into a shared library, likewise."""
        if not self.zig:
            self.compile(source, output, ["-shared", *options], quiet=quiet)
            return
        half = output.with_suffix(".o")
        self.compile(source, half, ["-c", *options], quiet=quiet)
        command = [*self.command, "-shared", "-nostdlib", str(half), "-o", str(output)]
        self._run(command, quiet=quiet)
        half.unlink()

    def _run(self, command: list[str], *, quiet: bool) -> None:
        said = subprocess.DEVNULL if quiet else None
        environment = dict(os.environ)
        if self.zig:
            place = _zig_cache().name
            environment |= {"ZIG_GLOBAL_CACHE_DIR": place, "ZIG_LOCAL_CACHE_DIR": place}
        subprocess.run(command, check=True, stderr=said, env=environment)

    def open(self, library: Path) -> ctypes.CDLL:
        """Load a library that it has made."""
        if self.zig:
            _load_runtime()
        return ctypes.CDLL(str(library))


@cache
def _zig_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zig-cache-")


@cache
def _load_runtime() -> ctypes.CDLL:
    return ctypes.CDLL(_RUNTIME, mode=ctypes.RTLD_GLOBAL)


def own_compiler() -> HostCompiler | None:
    """The machine's own, as `c++`."""
    path = shutil.which("c++")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], check=False, capture_output=True, text=True).stdout
    return HostCompiler((path,), unique="clang" not in said)


def zig_compiler() -> HostCompiler | None:
    """Zig's, if ziglang is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    return HostCompiler((sys.executable, "-m", "ziglang", "c++"), zig=True)


COMPILER = own_compiler() or zig_compiler()
