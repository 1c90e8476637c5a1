"""The CuTe kernel's own source on the CPU: a host compiler reads it with CuTe's own layouts,
swizzles and partitions; only the bodies of the atoms that hold inline assembly are replaced."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from kernels.cuda.family import Launch
from kernels.cute import family
from kernels.cute import flash_forward as kernel
from kernels.masks import mask_build, mask_tables
from tests.harness.cute_faults import FAULTS
from verify.arithmetic.dtypes import dtype_named
from verify.bundle import ROOT
from verify.cuda.edits import Edit
from verify.cuda.toolkit import includes as toolkit_includes
from verify.judging.comparison import compare
from verify.judging.known_forward import needed
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import AttentionArgs, Config

HOST = ROOT / "tests" / "harness" / "cuda_host"
SOURCE = Path(kernel.__file__).with_suffix(".cu")
has_headers = pytest.mark.skipif(
    family.headers() is None, reason="no CuTe headers: pip install --no-deps nvidia-cutlass"
)
has_host = pytest.mark.skipif(
    shutil.which("g++") is None or not toolkit_includes(), reason="no g++, or no CUDA headers"
)


# The source on the CPU.

CALL_MMA = """float c[4] = {c0, c1, c2, c3}; uint32_t const a[4] = {a0, a1, a2, a3};
ptx::mma_m16n8k16<ptx::Format::FORMAT>(c, a, b0, b1); d0 = c[0]; d1 = c[1]; d2 = c[2]; d3 = c[3];"""
CALL_LDMATRIX = """uint32_t d[4]; ptx::ldmatrix_x4TRANS(d, ptx::shared_address(&smem_src));
dst0 = d[0]; dst1 = d[1]; dst2 = d[2]; dst3 = d[3];"""
# Atom -> what its body becomes; in the file of cute/arch that defines it.
ATOMS = {
    "mma_sm80.hpp": {
        "SM80_16x8x16_F32F16F16F32_TN": CALL_MMA.replace("FORMAT", "float16"),
        "SM80_16x8x16_F32BF16BF16F32_TN": CALL_MMA.replace("FORMAT", "bfloat16"),
    },
    "copy_sm75.hpp": {
        "SM75_U32x4_LDSM_N": CALL_LDMATRIX.replace("TRANS", ""),
        "SM75_U16x8_LDSM_T": CALL_LDMATRIX.replace("TRANS", "_trans"),
    },
    "copy_sm80.hpp": {
        "SM80_CP_ASYNC_CACHEGLOBAL_ZFILL": (
            "ptx::cp_async_cg(ptx::shared_address(&smem_dst), &gmem_src, pred ? 16 : 0);"
        ),
    },
}
WAITS = {
    r"(cp_async_fence\(\)\s*\{).*?#endif": r"\1 ptx::cp_async_commit_group();",
    r"(\bcp_async_wait\(\)\s*\{).*?#endif": (
        r"\1 if (hasty) { ptx::cp_async_wait_group<N + 1>(); } else { "
        r"ptx::cp_async_wait_group<N>(); }"
    ),
}
PROGRAM = """
#include "ptx.cuh"
inline int dropped = 0;  // the line of a barrier that is passed by
inline bool hasty = false;  // waits leave one group more in flight
inline void barrier(int line) { if (line != dropped) { __syncthreads(); } }
extern "C" void weaken(int line, bool waits) { dropped = line; hasty = waits; }
#include <cuda/std/limits>
#include <cute/tensor.hpp>
#include "arguments.cuh"
#define __syncthreads() barrier(__LINE__)
inline int planted = -1;  // the fault that is, as its place in the list of faults
extern "C" void plant(int fault) { planted = fault; }
"""
# One for each build, in a namespace of its own: CuTe's headers, which take longest, are read once.
BUILD = """
namespace NAME {
DEFINES
#define ENTRY entry_NAME
#define run run_NAME
#include "run.cpp"
UNDEFS
}
"""


# Those that a build's macros change, that faults do, or that use a build's own types.
HEADERS = ("tiles.cuh", "intervals.cuh", "softmax.cuh", "fused_softmax.cuh")
# Where element (row, column) of a tile of 32 rows lies.
PLACES = """
namespace NAME {
#define ELEMENT half_t
TILES
#undef ELEMENT
template <int columns>
int place(int row, int column) { return tiles::TileLayout<32, columns>{}(row, column); }
extern "C" int place_NAME(int columns, int row, int column) {
  auto at = columns == 32 ? place<32> : columns == 96 ? place<96> : place<128>;
  return at(row, column);
}
}
"""
SWIZZLE = "Swizzle<piece<columns> == 64 ? 3 : 2, 3, 3>"
PLACED = {"right": SWIZZLE, "wrong": SWIZZLE.replace("2, 3, 3", "0, 3, 3")}


# Elements behind a tensor, so that a write past its end is counted and harms nothing
MARGIN = 2**14
ORDERS = tuple(
    {"backwards": backwards, "late": late} for backwards in (False, True) for late in (False, True)
)


class HostError(RuntimeError):
    """What a run did that no kernel may do."""


@dataclass(frozen=True)
class Ran:
    """What a run left: O, LSE, and the bank conflicts of matrix loads and copies."""

    out: Tensor
    lse: Tensor
    conflicts: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """One build in the shared library."""

    library: ctypes.CDLL
    entry: Callable[..., bytes]
    config: Config
    dtype: str
    head_dim: int

    def problem(self, text: str) -> Problem:
        return Problem.parse(f"{text},d={self.head_dim},dtype={self.dtype}")

    def run(
        self,
        problem: Problem,
        *,
        backwards: bool = False,
        late: bool = False,
        hidden: float | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Ran:
        """Raises HostError where the threads of a block part, addresses are bad, or anything but
        O and LSE is written.

        hidden: what K and V hold from the key on that no row sees.  given: q, k and v, by default
        the problem's.
        """
        inputs = tensors(problem).named if given is None else given
        q, k, v = (placed(inputs[name], problem, name) for name in ("q", "k", "v"))
        args = AttentionArgs(q, k, v, problem.mask, problem.scale, problem.score_mod, self.config)
        out = placed(torch.full(problem.shape_out, math.nan, dtype=q.dtype), problem, "out")
        count = math.prod(problem.shape_out[:3])
        storage = torch.full((count + MARGIN,), math.nan)
        lse = storage[:count].view(problem.shape_out[:3])
        conflicts = (ctypes.c_long * 2)()
        made = kernel.launch(self.config, self.dtype, args.head_dim, "")
        grid = args.batch * args.heads_q * math.ceil(args.seqlen_q / made.block_m)
        mask = mask_build(args)
        tables = mask_tables(args, mask)
        if hidden is not None:
            low, high = problem.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv)
            for batch, end in enumerate(high.where(low < high, 0).amax(1).tolist()):
                k[batch, :, end:] = hidden
                v[batch, :, end:] = hidden
        arguments = kernel.FAMILY.arguments(args, out, lse, mask, tables)
        error = self.entry(
            ctypes.byref(arguments),
            grid,
            made.threads,
            made.shared_bytes,
            backwards,
            late,
            conflicts,
        )
        if error:
            raise HostError(error.decode())
        written = int(
            torch.tensor([], dtype=out.dtype)
            .set_(out.untyped_storage())
            .isnan()
            .logical_not()
            .sum()
        )
        if written > out.numel():
            raise HostError(f"{written - out.numel()} elements written beside O")
        if not storage[count:].isnan().all():
            raise HostError("elements written behind LSE")
        return Ran(out, lse, (conflicts[0], conflicts[1]))

    def verdict(self, text: str, orders: tuple[dict[str, bool], ...] = ORDERS) -> Iterator[float]:
        """The worst error over its bound, of O and LSE, for each order of warps and copies;
        infinite where a run is refused or an empty row is not empty."""
        problem = self.problem(text)
        arithmetic = resolve(kernel.VARIANT.numerics, self.config, problem, "sm_90")
        truth = compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])
        live = ~truth.empty
        for order in orders:
            try:
                ran = self.run(problem, **order)
            except HostError:
                yield math.inf
                continue
            empty = bool(
                (ran.lse[truth.empty] == -math.inf).all() and (ran.out[truth.empty] == 0).all()
            )
            out = compare(ran.out, truth.out, truth.out_bound, problem.format_out).ratio[live]
            lse = compare(ran.lse, truth.lse, truth.lse_bound, dtype_named("float32")).ratio[live]
            known = needed(truth, ran.out, problem.format_out)[live]
            yield (
                max((float(part.max()) for part in (out, lse, known) if part.numel()), default=0.0)
                if empty
                else math.inf
            )


def placed(tensor: Tensor, problem: Problem, name: str) -> Tensor:
    """The tensor in its layout, expanded, in storage that is NaN elsewhere."""
    layout, (b, h, s, d) = problem.layouts[name], tensor.shape
    storage = torch.full(
        (layout.extent(problem.shapes[name]) + MARGIN,), math.nan, dtype=tensor.dtype
    )
    start = layout.offset + -storage.data_ptr() % 16 // tensor.itemsize
    view = storage.as_strided((b, h, s, d), layout.strides(problem.shapes[name]), start)
    return view.copy_(tensor).expand(problem.shapes[name])


SMALL, TALL, LARGE = kernel.CONFIGS
(WIDE,) = kernel.CONFIGS_D64
BUILDS = {
    "d32": (SMALL, "bfloat16", 32),
    "d64": (WIDE, "float16", 64),
    "d96": (TALL, "float16", 96),
    "d128": (LARGE, "bfloat16", 128),
    "d160": (SMALL, "float16", 160),
    "d192": (TALL, "bfloat16", 192),
    "d256": (SMALL, "bfloat16", 256),
}
"""Every config, pieces of 32 and of 64 columns, and the head dims above 128."""
UNEVEN = "uneven"
# No config: 48 keys do not divide 64 rows.
CHOICES = BUILDS | {UNEVEN: (replace(SMALL, block_n=48), "bfloat16", 64)}


def compiled(folder: Path, names: Iterable[str] = BUILDS) -> Path:
    """The library of these builds; CuTe's headers, which take longest, are read once."""
    shutil.rmtree(folder, ignore_errors=True)  # what a compilation that failed has left
    program = PROGRAM
    tiles = without_guard(SOURCE.with_name("tiles.cuh"))
    for name, swizzle in PLACED.items():
        text = Edit(re.escape(SWIZZLE), swizzle).apply({"tiles": tiles})["tiles"]
        program += PLACES.replace("NAME", name).replace("TILES", text)
    for name in names:
        launch = kernel.launch(*CHOICES[name], "")
        program += build(folder, name, launch, FAULTS)
    return compiled_program(folder, program)


def compiled_program(
    folder: Path, text: str, patch: Callable[[Path, Path], None] = lambda headers, folder: None
) -> Path:
    """The shared library of a program that includes CuTe; the folder becomes its own.

    patch: called with CuTe's headers and the folder, where it puts further headers of its own.
    """
    headers = family.headers()
    assert headers is not None
    patch_atoms(headers / "cute" / "arch", folder / "cute" / "arch")
    patch(headers, folder)
    (folder / "program.cpp").write_text(text)
    library = folder / "compiled.so"
    subprocess.run(
        ["g++", *compiler_options(), "-shared", folder / "program.cpp", "-o", library]
        + [f"-I{directory}" for directory in include_folders(folder)],
        check=True,
    )
    return library


def compiler_options() -> tuple[str, ...]:
    """Those of g++ for a program that includes CuTe."""
    # Instantiating templates, a fifth of the time goes into collecting garbage, unless it may grow.
    memory = ("--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=1048576")
    # -Og compiles in four fifths of the time of -O1, and its code takes up to twice as long.
    return ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", *memory)


def include_folders(first: Path) -> tuple[Path, ...]:
    """Where such a program finds headers: there, then those of the host, the kernels and CuTe."""
    headers = family.headers()
    assert headers is not None
    return (first, HOST, SOURCE.parent, ROOT / "kernels" / "cuda", headers, *toolkit_includes())


def library_of_all(
    factory: pytest.TempPathFactory, name: str, compile: Callable[[Path], Path]
) -> ctypes.CDLL:
    """What `compile` makes in a folder, once for all workers of a run."""
    return ctypes.CDLL(str(file_of_all(factory, name, compile)))


def file_of_all(
    factory: pytest.TempPathFactory, name: str, compile: Callable[[Path], Path]
) -> Path:
    """The file of that library.  The directories of a run's workers lie beside each other."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    path = folder / "program.so"
    with FileLock(f"{folder}.lock"):
        if not path.exists():
            compile(folder).rename(path)
    return path


def build(folder: Path, name: str, launch: Launch, faults: Mapping[str, tuple[str, str]]) -> str:
    """One kernel in a namespace of its own, of copies of its sources that can be read again and in
    which faults can be planted: an expression of theirs, and what it becomes everywhere."""
    place = folder / name
    place.mkdir(parents=True)
    path = launch.source.path
    texts = {path.name: path.read_text()}
    for header in HEADERS:
        texts[header] = without_guard(path.with_name(header))
    for n, (right, wrong) in enumerate(faults.values()):
        switch = f"(planted == {n} ? ({wrong}) : ({right}))"
        texts = Edit(re.escape(right), switch, times=None).apply(texts)
    for file, text in texts.items():
        (place / file).write_text(text)
    defines = dict(launch.source.defines)
    kept = {key: value for key, value in defines.items() if key != "WALK"}
    entry = "WALK" if "WALK" in defines else launch.source.entry
    named = {"KERNEL": f'"{place / path.name}"', entry: f"entry_{name}"}
    lines = [f"#define {key} {value}" for key, value in (kept | named).items()]
    undefined = (*kept, *named, "ENTRY", "run")
    made = BUILD.replace("NAME", name).replace("DEFINES", "\n".join(lines))
    return made.replace("UNDEFS", "\n".join(f"#undef {word}" for word in undefined))


def without_guard(header: Path) -> str:
    """The text of a header that can be read again."""
    return header.read_text().replace("#pragma once\n", "\n")


def patch_atoms(here: Path, there: Path) -> None:
    """Copies of CuTe's headers in which the atoms' bodies are calls."""
    shutil.rmtree(there, ignore_errors=True)  # what a compilation that failed has left
    there.mkdir(parents=True)
    for file, atoms in ATOMS.items():
        text = (here / file).read_text()
        bodies = {
            rf"(struct {atom}\b.*?)CUTE_INVALID_CONTROL_PATH\([^;]*;": rf"\1 {body}"
            for atom, body in atoms.items()
        }
        for pattern, body in (bodies | (WAITS if file == "copy_sm80.hpp" else {})).items():
            text, count = re.subn(pattern, body, text, count=1, flags=re.DOTALL)
            assert count == 1, pattern
        (there / file).write_text(text)
