"""NVRTC and its cache: what is compiled, once, and the resources and errors of it."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.meta.cuda.conftest import DOUBLED
from verify.cuda import compile as cuda
from verify.cuda.compile import (
    Binary,
    CompileError,
    Source,
    compilable,
    compile_source,
    resources_from,
)
from verify.variant import Resources

compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")

MADE = Binary(b"cubin", "doubled", Resources(8, 0, 0, 0, 0))


class Compiler:
    """Replaces NVRTC and counts compilations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(cuda, "_compile", self._compile)
        monkeypatch.setattr(cuda, "compilable", lambda: None)
        monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "13.0")

    def _compile(self, source: Source, arch: str) -> Binary:
        self.calls += 1
        return MADE


# The cache.


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.cubin"))


def test_what_was_compiled_once_is_read(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    for _ in range(3):
        assert compile_source(source, "sm_90a") == MADE
    assert compiler.calls == 1
    assert len(entries(tmp_path)) == 1


def test_whatever_goes_in_has_an_entry_of_its_own(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    others = [
        source,
        replace(source, defines=(("A", "1"),)),
        replace(source, defines=(("A", "2"),)),
        replace(source, options=(("fma", False),)),
        replace(source, entry="tripled"),
    ]
    for other in others:
        compile_source(other, "sm_90a")
    compile_source(source, "sm_80")
    (tmp_path / "headers" / "factor.h").write_text("#define FACTOR 3\n")
    compile_source(source, "sm_90a")
    (tmp_path / "doubled.cu").write_text(DOUBLED + "\n")
    compile_source(source, "sm_90a")
    monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "13.1")
    compile_source(source, "sm_90a")
    assert compiler.calls == len(entries(tmp_path)) == len(others) + 4


def test_a_header_behind_a_header_counts(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    (tmp_path / "headers" / "factor.h").write_text("#if 0\n  #  include <deep/value.h>\n#endif\n")
    (tmp_path / "headers" / "deep").mkdir()
    for value in ("#define FACTOR 2", "#define FACTOR 4"):
        (tmp_path / "headers" / "deep" / "value.h").write_text(value)
        compile_source(source, "sm_90a")
    assert compiler.calls == 2


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"cubin", b"[1]\ncubin"], ids=str)
def test_a_torn_entry_is_made_again(
    damage: bytes, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    compile_source(source, "sm_90a")
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    for torn in (damage, whole[:-1], whole + b"x", whole.replace(b"cubin", b"cubim")):
        entry.write_bytes(torn)
        assert compile_source(source, "sm_90a") == MADE
        assert entry.read_bytes() == whole
    assert compiler.calls == 5
    assert not list((tmp_path / "cache").glob("*.part"))


def test_workers_side_by_side_compile_once(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch)
    fork = multiprocessing.get_context("fork")
    start, log = fork.Barrier(4), tmp_path / "log"

    def slowly(source: Source, arch: str) -> Binary:
        with log.open("a") as file:
            file.write("compiled\n")
        time.sleep(0.2)
        return MADE

    def work() -> None:
        start.wait()
        assert compile_source(source, "sm_90a") == MADE

    monkeypatch.setattr(cuda, "_compile", slowly)
    workers = [fork.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert log.read_text() == "compiled\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"VERIFY_CUDA_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/attention-verify/cuda"),
        ({"HOME": "/h"}, "/h/.cache/attention-verify/cuda"),
    ],
    ids=str,
)
def test_where_the_cache_is(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VERIFY_CUDA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cuda.cache_directory() == Path(expected)


# Reports of ptxas (CUDA 13.0), unchanged.

TWO_KERNELS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'bar' for 'sm_80'
ptxas info    : Function properties for bar
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 7.550 ms
ptxas info    : Compiling entry function 'foo' for 'sm_80'
ptxas info    : Function properties for foo
ptxas         .     400 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 400 bytes cumulative stack size, 1024 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 11.221 ms
"""  # noqa: E501 - a log as ptxas writes it


def test_resources_are_those_of_the_entry() -> None:
    assert resources_from(TWO_KERNELS, "bar") == Resources(
        registers=8, shared=0, stack=0, spill_stores=0, spill_loads=0
    )
    assert resources_from(TWO_KERNELS, "foo") == Resources(
        registers=40, shared=1024, stack=400, spill_stores=12, spill_loads=16
    )
    for missing in ("fo", "foobar"):
        with pytest.raises(ValueError, match=f"no resources of {missing}$"):
            resources_from(TWO_KERNELS, missing)
    with pytest.raises(ValueError, match=r"no resources of foo$"):
        resources_from(TWO_KERNELS.replace("registers", "things"), "foo")


# NVRTC itself.


@compiles
def test_a_source_compiles_with_its_headers_and_resources(source: Source, tmp_path: Path) -> None:
    binary = compile_source(source, "sm_90a")
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.entry == "doubled"
    assert binary.resources.registers > 0
    assert binary.resources.spill_stores == binary.resources.stack == binary.resources.shared == 0
    assert compile_source(source, "sm_90a") == binary


@compiles
def test_spills_and_shared_memory_are_seen(source: Source, tmp_path: Path) -> None:
    (tmp_path / "doubled.cu").write_text("""
extern "C" __global__ void doubled(float* x) {
    __shared__ float s[300];
    float held[64];
    for (int i = 0; i < 64; ++i) held[i] = x[64 * threadIdx.x + i];
    s[threadIdx.x] = held[3];
    __syncthreads();
    for (int i = 0; i < 64; ++i) x[64 * threadIdx.x + i] = held[i] + held[63 - i] + s[i];
}
""")
    resources = compile_source(
        replace(source, options=(("max_register_count", 32),)), "sm_80"
    ).resources
    assert resources.registers <= 32
    assert resources.shared == 1200
    assert min(resources.spill_stores, resources.spill_loads, resources.stack) > 0


@compiles
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'extern "C" __global__ void doubled(float* x) {\n    x[0] = y;\n}\n',
            r'doubled\.cu\(2\): error: identifier "y"',
        ),
        ('extern "C" __global__ void other() {}\n', "no resources of doubled"),
        (
            (
                'extern "C" __global__ void doubled(int i) { __shared__ volatile int s[90000]; s[i]'
                " = 1; }\n"
            ),
            "too much shared data",
        ),
        ('#include "nowhere.h"\n', "nowhere.h"),
    ],
    ids=("front end", "entry", "ptxas", "header"),
)
def test_an_error_shows_the_compilers_log(
    text: str, words: str, source: Source, tmp_path: Path
) -> None:
    (tmp_path / "doubled.cu").write_text(text)
    with pytest.raises(CompileError, match=words):
        compile_source(source, "sm_90a")
    assert not entries(tmp_path)
