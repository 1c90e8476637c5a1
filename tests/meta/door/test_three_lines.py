"""What a kernel's author writes, three lines for each: a flash_attn_func, a torch.autograd.Function
and a .cu file of their own, a right one and a wrong one of each."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.harness.host_library import host_library, runs
from tests.meta.door.test_adapters import BASE, DOUBLES
from tests.meta.door.test_callables import OBJECTS
from tests.meta.door.test_checking import QUIETLY, run
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.cuda.compile import CompileError, Source, compilable, compile_source
from verify.door.stand_in import stand_in
from verify.evidence import Recorder
from verify.problem import Problem

CUDA = """
#ifdef ON_HOST
#include "block.h"
#endif

struct Arguments {
    const float *q, *k, *v;
    float* out;
    int rows, seqlen_q, seqlen_kv;
    float scale;
};

// A thread has a row; the second pass divides by what the first one has summed.
extern "C" __global__ void attention(Arguments a) {
    constexpr int dim = 32;
    const int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= a.rows) return;
    const float* q = a.q + row * dim;
    const int first = row / a.seqlen_q * a.seqlen_kv;
    float largest = -1e38f, total = 0.0f, out[dim] = {};
    for (int pass = 0; pass < 2; ++pass) {
        for (int key = 0; key < KEYS; ++key) {
            float score = 0.0f;
            for (int d = 0; d < dim; ++d) score += q[d] * a.k[(first + key) * dim + d];
            score *= a.scale;
            if (pass == 0) { largest = score > largest ? score : largest; continue; }
            const float weight = expf(score - largest);
            total += weight;
            for (int d = 0; d < dim; ++d) out[d] += weight * a.v[(first + key) * dim + d];
        }
    }
    for (int d = 0; d < dim; ++d) a.out[row * dim + d] = out[d] / total;
}
"""
HOST = """
import ctypes
from pathlib import Path

import torch

DTYPES = ("float32",)
HEAD_DIMS = (32,)
SOURCE = Path(__file__).parent / "cuda" / Path(__file__).with_suffix(".cu").name


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int) for name in ("rows", "seqlen_q", "seqlen_kv")),
        ("scale", ctypes.c_float),
    )


def attention(q, k, v, softmax_scale=None):
    out = torch.empty_like(q)
    pointers = (x.data_ptr() for x in (q, k, v, out))
    given = Arguments(*pointers, q[..., 0].numel(), q.shape[2], k.shape[2], softmax_scale)
    grid = -(-given.rows // 64)
    if q.is_cuda:
        from verify.cuda import compile as cuda

        binary = cuda.compile_source(
            cuda.Source(SOURCE, "attention"), cuda.device_arch(q.device)
        )
        cuda.launch(cuda.load(binary), (grid,), (64,), 0, given)
        return out
    library = ctypes.CDLL(str(SOURCE.with_suffix(".so")))
    library.run.restype = ctypes.c_char_p
    error = library.run(
        ctypes.byref(given), grid, 64, 0, False, False, (ctypes.c_long * 2)()
    )
    assert not error, error
    return out
"""
PROBLEM = Problem(heads_q=2, heads_kv=2, seqlen_q=33, seqlen_kv=70, head_dim=32, dtype="float32")


def cuda_file(folder: Path, name: str, keys: str) -> None:
    """A kernel of the author's, and its library for a machine without a GPU."""
    source = folder / "cuda" / f"{name}.cu"
    source.parent.mkdir(exist_ok=True)
    source.write_text(CUDA.replace("KEYS", keys), encoding="utf-8")
    (folder / f"{name}.py").write_text(HOST, encoding="utf-8")
    host_library(source, "attention", [("ON_HOST", "1")])


@runs
def test_a_cuda_source_of_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, keys in (("right_cuda", "a.seqlen_kv"), ("wrong_cuda", "a.seqlen_kv - 1")):
        cuda_file(tmp_path, name, keys)
    names = ("right_cuda", "wrong_cuda")
    found = roster([stand_in(importlib.import_module(name).attention, {}) for name in names])
    assert not found.failures, found.failures
    judge = Judge(Recorder(tmp_path / "run", "main"))
    try:
        targets = [Target(d, d.configs[0], "float32", "accuracy") for d in found.declarations]
        right, wrong = (
            [verdict.finding for verdict in judge.judge(target, PROBLEM)] for target in targets
        )
    finally:
        judge.close()
    assert right == [None] * len(right)
    assert any(finding is not None and "out is off by" in finding.message for finding in wrong)


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_without_a_gpu_the_cuda_source_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler sees a typing error, with its line, and no wrong result."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    for keys in ("a.seqlen_kv", "a.seqlen_kv - 1"):
        path = tmp_path / "attention.cu"
        path.write_text(CUDA.replace("KEYS", keys), encoding="utf-8")
        binary = compile_source(Source(path, "attention"), "sm_90a")
        assert binary.resources.registers > 0
    path.write_text(CUDA.replace("KEYS", "a.seqlen_k"), encoding="utf-8")
    line = CUDA.partition("KEYS")[0].count("\n") + 1
    with pytest.raises(CompileError, match=rf"\({line}\): error: .*seqlen_k"):
        compile_source(Source(path, "attention"), "sm_90a")


THREE_LINES = """
import verify
import objects, right_cuda, right_flash, wrong_cuda, wrong_flash

FEW = {"examples": 1, "dtypes": ["float32"], "head_dims": [32], "masks": ["full"]}
FLASH = {"examples": 1, "like": "flash_attn_func", "dtypes": ["bfloat16"], "masks": ["full"]}


def test_right_flash(): verify.check(right_flash.flash_attn_func, **FLASH)
def test_wrong_flash(): verify.check(wrong_flash.flash_attn_func, **FLASH)
def test_right_function(): verify.check(objects.Flash.apply, **FEW)
def test_wrong_function(): verify.check(objects.WithoutDelta.apply, **FEW)
def test_right_cuda(): verify.check(right_cuda.attention, **FEW)
def test_wrong_cuda(): verify.check(wrong_cuda.attention, **FEW)
"""


@pytest.mark.thorough
@runs
def test_all_of_them_in_a_test_file_of_the_authors(tmp_path: Path) -> None:
    cuda_file(tmp_path, "right_cuda", "a.seqlen_kv")
    cuda_file(tmp_path, "wrong_cuda", "a.seqlen_kv - 1")
    for name, scale in (("right_flash", 1.0), ("wrong_flash", 1.3)):
        text = f"SCALE = {scale}\n{BASE}{DOUBLES['flash_attn_func']}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "objects.py").write_text(OBJECTS, encoding="utf-8")
    (tmp_path / "test_mine.py").write_text(THREE_LINES, encoding="utf-8")
    done = run("pytest", *QUIETLY[:-1], "test_mine.py", cwd=tmp_path, fresh=True)
    failed = {f"test_wrong_{name}" for name in ("flash", "function", "cuda")}
    assert "3 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    for name in failed:
        assert f"FAILED test_mine.py::{name} - AssertionError" in done.stdout
    assert "gradient_bound: dq is off by" in done.stdout or "dk is off by" in done.stdout
