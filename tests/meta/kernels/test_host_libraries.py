"""Libraries of the host compilers: Zig's from PyPI judges a kernel as the machine's own does, and
each build in a process computes with its own constants."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.cuda import family
from kernels.ptx.tiling import ROOM
from tests.harness import host_compiler
from tests.harness.host_compiler import HostCompiler, own_compiler, zig_compiler
from tests.harness.host_library import compiled, host_library
from tests.harness.ptx_cases import problems
from tests.harness.ptx_host import MODULES, Choice, Host, convict, macros, run, written

# By its address, as std::min takes it where a compiler does not optimise.
SOURCE = """#include "block.h"
struct Arguments { int* to; };
struct Build { static constexpr int width = WIDTH; };
void ENTRY(Arguments a) {
    const int* volatile width = &Build::width;
    *a.to = *width;
}
"""
FOUND = {"own": own_compiler(), "zig": zig_compiler()}
COMPILERS = [
    pytest.param(
        compiler, id=name, marks=pytest.mark.skipif(compiler is None, reason=f"{name}: none here")
    )
    for name, compiler in FOUND.items()
]


class Arguments(ctypes.Structure):
    _fields_ = (("to", ctypes.POINTER(ctypes.c_int)),)


@pytest.mark.for_ci
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_build_reads_its_own_constants(tmp_path: Path, compiler: HostCompiler) -> None:
    found = []
    for width in (64, 128):
        (tmp_path / str(width)).mkdir()
        kernel = tmp_path / str(width) / "kernel.cu"
        kernel.write_text(SOURCE, encoding="utf-8")
        library = host_library(kernel, "entry", [("WIDTH", str(width))], compiler)
        number = ctypes.c_int()
        given = Arguments(ctypes.pointer(number))
        conflicts = (ctypes.c_long * 2)()
        error = library.run(ctypes.byref(given), 1, 32, 0, False, False, conflicts)
        assert not error, error
        found.append(number.value)
    assert found == [64, 128]


@pytest.mark.parametrize("compiler", COMPILERS[1:])
@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "a sum not rescaled"])
def test_zig_builds_a_kernel_that_is_judged(
    tmp_path: Path, compiler: HostCompiler, wrong: bool
) -> None:
    choice = Choice("share_kv", 3, "bfloat16", 64)
    source = MODULES[choice.name].TILING.launch(*choice.build, narrow=False).source
    line = "l[i][h] *= alpha[i][h];"
    kernel = written(source, tmp_path, lambda text: text.replace(line, "") if wrong else text)
    assert (line in kernel.read_text("utf-8")) is not wrong
    library = compiled(kernel, source.entry, macros(source), compiler=compiler)
    host = Host(source, tmp_path, library=library, compiler=compiler)
    problem = next(problems(choice))
    with (
        patch.object(family, "loaded", lambda source, arch: host),
        patch.object(family, "device_arch", lambda device: "host"),
        patch.object(family, "shared_room", lambda device: ROOM),
        patch.object(family, "launch", lambda kernel, *rest: kernel.launch(*rest)),
    ):
        config = choice.build[0]
        said = convict(choice.variant, problem, config, *run(choice.variant, problem, config))
    assert (said is not None) == wrong, said


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_source_that_is_wrong_is_refused(tmp_path: Path, compiler: HostCompiler) -> None:
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(f"{SOURCE}int no = words", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        compiled(kernel, "entry", [("WIDTH", "1")], quiet=True, compiler=compiler)


def test_without_a_compiler_the_message_names_zig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_compiler.importlib.util, "find_spec", lambda name: None)
    assert own_compiler() is None
    assert zig_compiler() is None
    with pytest.raises(RuntimeError, match="ziglang from PyPI"):
        compiled(tmp_path / "kernel.cu", "entry", [], compiler=None)


def test_a_compiler_that_is_clang_is_not_told_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for said, flags in (("clang version 21", ("-Og",)), ("c++ 15", ("-Og", "-fno-gnu-unique"))):
        (tmp_path / "c++").write_text(f"#!/bin/sh\necho '{said}'\n", encoding="utf-8")
        (tmp_path / "c++").chmod(0o755)
        made = own_compiler()
        assert made is not None
        assert made.flags == flags
