"""Tests of NVRTC, its cache and launches; and inline assembly is in two headers alone."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verify.arithmetic.archs import arch_named
from verify.cell.loading import load, sources_of
from verify.cuda import compile as cuda
from verify.cuda.compile import (
    Binary,
    CompileError,
    Kernel,
    LaunchError,
    Source,
    compilable,
    compile_source,
    resources_from,
)
from verify.variant import Resources, compiled_archs

ROOT = Path(__file__).resolve().parents[3]
compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")

DOUBLED = """
#include "factor.h"
extern "C" __global__ void doubled(float* x) { x[threadIdx.x] *= FACTOR; }
"""
MADE = Binary(b"cubin", "doubled", Resources(8, 0, 0, 0, 0))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A source with its header, and an empty cache."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "factor.h").write_text("#define FACTOR 2\n")
    (tmp_path / "doubled.cu").write_text(DOUBLED)
    return Source(tmp_path / "doubled.cu", "doubled", includes=(tmp_path / "headers",))


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


# Where nothing can be compiled or run.


def test_without_cuda_core_there_is_a_reason(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = compilable.__wrapped__()
    assert reason is not None
    assert "cuda.core" in reason
    monkeypatch.setattr(cuda, "compilable", lambda: reason)
    with pytest.raises(CompileError, match=re.escape(reason)):
        compile_source(source, "sm_90a")


def test_kernels_import_without_cuda_core() -> None:
    code = "import kernels.ptx.split_q, sys; sys.exit('cuda.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_nothing_is_loaded_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: "no CUDA device")
    with pytest.raises(LaunchError, match="no CUDA device"):
        cuda.load(MADE)


class Pair(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("number", ctypes.c_float)]


@compiles
@pytest.mark.parametrize(
    "wrong",
    [(0,), (0, 0), (0, np.float64(1)), (0, Pair(), 0), (0, 1.0), (0, None)],
    ids=["few", "narrow", "numpy", "many", "float", "none"],
)
def test_arguments_that_do_not_fit_are_not_launched(wrong: tuple[Any, ...]) -> None:
    kernel = Kernel(handle=None, entry="doubled", sizes=(8, 4))
    with pytest.raises(LaunchError):
        cuda.launch(kernel, (1,), (32,), 0, *wrong)


ARGUMENTS = (2**40 + 1, np.float32(1.5), ctypes.c_int32(-2), Pair(3, 1.5))
BYTES = [
    (2**40 + 1).to_bytes(8, "little"),
    b"\0\0\xc0\x3f",
    b"\xfe\xff\xff\xff",
    b"\3" + bytes(7) + b"\0\0\xc0\x3f" + bytes(4),
]
KERNEL = Kernel(SimpleNamespace(handle=0x77), "doubled", tuple(len(data) for data in BYTES))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake driver that records its calls and answers with `status`."""
    from cuda.bindings import driver

    calls = SimpleNamespace(status=0, launches=[], allowed=[])

    def launch(function: int, *rest: Any) -> tuple[int]:
        pointers = (ctypes.c_void_p * len(KERNEL.sizes)).from_address(rest[-2])
        data = [
            ctypes.string_at(pointer, size)
            for pointer, size in zip(pointers, KERNEL.sizes, strict=True)
        ]
        calls.launches.append((function, *rest[:-2], data))
        return (calls.status,)

    def allow(attribute: Any, size: int, kernel: int, device: int) -> tuple[int]:
        calls.allowed.append(
            (attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), size, kernel, device)
        )
        return (calls.status,)

    monkeypatch.setattr(driver, "cuLaunchKernel", launch)
    monkeypatch.setattr(driver, "cuKernelSetAttribute", allow)
    monkeypatch.setattr(cuda, "_make_current", lambda: None)
    monkeypatch.setattr(cuda, "_allowed", {})
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0x55))
    return calls


@compiles
def test_a_launch_passes_what_it_was_given(driver: SimpleNamespace) -> None:
    cuda.launch(KERNEL, (5, 2), (128,), 1024, *ARGUMENTS)
    assert driver.launches == [(0x77, 5, 2, 1, 128, 1, 1, 1024, 0x55, BYTES)]


@compiles
def test_much_shared_memory_is_asked_for_once(driver: SimpleNamespace) -> None:
    for size in (48 * 1024, 60_000, 80_000, 60_000, 80_000):
        cuda.launch(KERNEL, (1,), (32,), size, *ARGUMENTS)
    assert driver.allowed == [
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", size, 0x77, 3) for size in (60_000, 80_000)
    ]


@compiles
def test_an_error_of_the_driver_is_raised(driver: SimpleNamespace) -> None:
    driver.status = 1
    for size, what in ((0, r"launch of \(1,\)"), (60_000, "bytes of shared memory")):
        with pytest.raises(LaunchError, match=f"doubled: .*{what}.*: 1"):
            cuda.launch(KERNEL, (1,), (32,), size, *ARGUMENTS)


# What the hash of a kernel's source covers.


@pytest.mark.parametrize("stem", ["ptx/split_q", "cute/flash_forward"])
def test_a_kernels_sources_are_its_own_files_and_what_it_has_of_kernels_cuda(stem: str) -> None:
    path = ROOT / "kernels" / f"{stem}.py"
    own = {path, path.with_suffix(".cu"), path.with_name("__init__.py")}
    names = ("__init__.py", "family.py", "arguments.cuh", "ptx.cuh")
    shared = {ROOT / "kernels" / "cuda" / name for name in names}
    shared |= {ROOT / "kernels" / "masks.py", *path.parent.glob("*.cuh")}
    shared |= {ROOT / "verify" / "cuda" / name for name in ("__init__.py", "compile.py")}
    assert {Path(name) for name in load(path, str(ROOT)).sources} >= own | shared


def test_only_imported_helpers_are_hashed() -> None:
    folder, path = ROOT / "kernels" / "cuda", ROOT / "kernels" / "ptx" / "split_q.py"
    compiler = ROOT / "verify" / "cuda"
    imported = {
        path,
        compiler / "compile.py",
        folder / "__init__.py",
        folder.parent / "triton" / "common.py",
        compiler.parent / "variant" / "__init__.py",
    }
    assert set(map(Path, sources_of(imported, path))) == {
        path,
        path.with_suffix(".cu"),
        compiler / "compile.py",
        folder / "__init__.py",
        folder / "arguments.cuh",
        folder / "ptx.cuh",
        *path.parent.glob("*.cuh"),
    }
    assert sources_of({path}, path) == (str(path.with_suffix(".cu")), str(path))


# ptx.cuh.


def test_inline_assembly_is_in_the_header_of_kernels_and_that_of_probes() -> None:
    with_assembly = {
        path.relative_to(ROOT).as_posix()
        for folder in ("kernels", "verify")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cu", ".cuh", ".h", ".hpp")
        and re.search(r"\basm\b", path.read_text(encoding="utf-8"))
    }
    assert with_assembly == {"kernels/cuda/ptx.cuh", "verify/probes/ptx_probes.cuh"}


CALLS = """
    using ptx::Format;
    float f[4] = {x[0], x[1], x[2], x[3]};
    ptx::u32 a[4], h[2] = {0, 0}, b, at = ptx::shared_address(tile) + 16 * threadIdx.x;
    ptx::cp_async_cg(at, x, 16);
    ptx::cp_async_ca(at + 512, x, 8);
    ptx::cp_async_ca<8>(at + 1024, x, 8);
    ptx::cp_async_ca<4>(at + 1028, x, 0);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    ptx::ldmatrix_x4(a, at);
    ptx::ldmatrix_x1(b, at);
    ptx::ldmatrix_x2(h, at);
    ptx::mma_m16n8k16<Format::float16>(f, a, b, h[0]);
    ptx::ldmatrix_x4_trans(a, at);
    ptx::ldmatrix_x1_trans(b, at);
    ptx::ldmatrix_x2_trans(h, at);
    ptx::mma_m16n8k16<Format::bfloat16>(f, a, b, h[0]);
    ptx::mma_m16n8k16_f16(h, a, b, b);
    ptx::unpack<Format::float16>(b, f[0], f[1]);
    ptx::unpack<Format::bfloat16>(h[1], f[2], f[3]);
    x[threadIdx.x] = ptx::ex2(f[0]) + ptx::lg2(f[1]) + ptx::rcp(f[2]) + ptx::shfl_bfly(f[3], 1)
        + h[0] + h[1] + ptx::pack<Format::float16>(f[0], f[1])
        + ptx::pack<Format::bfloat16>(f[2], f[3]) + ptx::ex2_approx_f16x2(a[0])
        + ptx::prmt(a[1], a[2], 0x6420) + ptx::shfl_bfly(a[3], 2) + ptx::shfl_idx(b, 0);
"""
CALLS_89 = """
    a[0] = ptx::pack<Format::float8_e4m3fn>(f[0], f[1], f[2], f[3]);
    a[1] = ptx::pack<Format::float8_e5m2>(f[0], f[1], f[2], f[3]);
    ptx::mma_m16n8k32<Format::float8_e4m3fn>(f, a, b, h[0]);
    ptx::mma_m16n8k32<Format::float8_e5m2>(f, a, b, h[0]);
    x[threadIdx.x] += f[0];
"""
CALLS_90 = """
    ptx::stmatrix_x1(at, b);
    ptx::stmatrix_x2(at, h);
    ptx::stmatrix_x4(at, a);
    ptx::stmatrix_x1_trans(at, b);
    ptx::stmatrix_x2_trans(at, h);
    ptx::stmatrix_x4_trans(at, a);
"""


@compiles
@pytest.mark.parametrize("arch", compiled_archs())
def test_every_instruction_compiles(arch: str, source: Source, tmp_path: Path) -> None:
    header = (ROOT / "kernels" / "cuda" / "ptx.cuh").read_text(encoding="utf-8")
    assert set(re.findall(r"__forceinline__ \w+ (\w+)\(", header)) == set(
        re.findall(r"ptx::(\w+)(?:<[^>]*>)?\(", CALLS + CALLS_89 + CALLS_90)
    )
    capability = arch_named(arch).capability or (0, 0)
    calls = CALLS + CALLS_89 * (capability >= (8, 9)) + CALLS_90 * (capability >= (9, 0))
    text = (
        '#include "ptx.cuh"\nextern "C" __global__ void doubled(float* x) { __shared__ float'
        f" tile[1024];\n{calls}}}\n"
    )
    (tmp_path / "doubled.cu").write_text(text)
    assert compile_source(source, arch).resources.shared == 4096
