"""Inline assembly is in two headers alone, and every instruction of ptx.cuh compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.meta.cuda.test_compile import compiles
from verify.arithmetic.archs import arch_named
from verify.bundle import ROOT
from verify.cuda.compile import (
    Source,
    compile_source,
)
from verify.variant import compiled_archs


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
