"""The raw-PTX kernels on the CPU: their own sources, compiled by a host compiler and launched by
their own `forward`.

`cuda_host` runs a block's threads as fibers, its warps as unfairly as can be (each as far as it
gets, the first or the last first; copies that land at once, or as late as they may), on shared
memory of NaN, and counts bank conflicts.  Only ptx.cuh and the launch are replaced.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.ptx import (
    share_kv,
    share_qkv,
    split_kv,
    split_q,
    split_q_fp8,
    tiling_qk,
    tiling_qkv,
)
from tests.harness.host_compiler import COMPILER, HostCompiler
from tests.harness.host_library import host_library, opened
from verify.arithmetic.dtypes import dtype_named
from verify.bundle import ROOT
from verify.cuda.compile import Source
from verify.judging.comparison import compare
from verify.judging.known_forward import needed
from verify.judging.truth import compute_truth
from verify.problem import Layout, Problem, Storage
from verify.problem.inputs import dequantised, stored_factors, tensors
from verify.problem.storage import STRIDED
from verify.problem.storage.transposed import Transposed
from verify.tolerance.forward import resolve
from verify.variant import AttentionArgs, Config, Descales, Stored, Variant

BESIDE = 0xFFFF  # what lies beside the inputs: NaN in every format of 8 and 16 bits

MODULES = {
    module.TILING.name: module
    for module in (
        split_q,
        split_q_fp8,
        split_kv,
        share_kv,
        share_qkv,
        tiling_qk,
        tiling_qkv,
    )
}


@dataclass(frozen=True)
class Schedule:
    """In which order a block's warps run, and when their copies land."""

    backwards: bool
    late: bool


SCHEDULES = [Schedule(*choice) for choice in itertools.product((False, True), repeat=2)]


BEFORE = """#include "ptx.cuh"
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
"""
PARTS = [
    ROOT / "kernels" / place
    for place in (
        *("cuda/arguments.cuh", "ptx/tile.cuh", "ptx/policies.cuh"),
        *("ptx/pipeline.cuh", "ptx/flash.cuh"),
    )
]


def part(text: str) -> str:
    """A file's text as `written` has it."""
    return re.sub(r"(?m)^#(pragma once|include.*)\n", "", text)


def written(source: Source, folder: Path, edit: Callable[[str], str] = lambda text: text) -> Path:
    """All of a kernel's text but ptx.cuh, in one file, with a text of it replaced."""
    text = "".join(part(path.read_text(encoding="utf-8")) for path in (*PARTS, source.path))
    kernel = folder / "kernel.cu"
    kernel.write_text(f"{BEFORE}{edit(text)}", encoding="utf-8")
    return kernel


def macros(source: Source, arch: int = 0) -> list[tuple[str, str]]:
    """The macros of a build on the CPU."""
    named = [("__CUDA_ARCH__", str(arch))] if arch else []
    return [*source.defines, ("BESIDE", str(BESIDE)), *named]


class Host:
    """A source compiled for the CPU, with a text of it replaced.

    library: of an earlier compilation by that compiler, in place of one now.  entry: its function.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        edit: Callable[[str], str] = lambda text: text,
        *,
        library: Path | None = None,
        entry: str = "run",
        compiler: HostCompiler | None = COMPILER,
    ) -> None:
        if library is None:
            kernel = written(source, folder, edit)
            self.library = host_library(kernel, source.entry, macros(source), compiler)
        else:
            self.library = opened(library, compiler)
        self._run = self.library[entry]
        self._run.restype = ctypes.c_char_p
        self.schedule = SCHEDULES[0]
        # A slice of V goes into a tile of more columns: there, as in padded rows narrower than 128
        # bytes, copies can meet.
        padded = "padded" in dict(source.defines).values()
        self.copies_apart = not padded and source.entry != "tiling_qk"

    def launch(
        self, grid: tuple[int], block: tuple[int], shared_bytes: int, arguments: ctypes.Structure
    ) -> None:
        """As `verify.cuda.compile.launch`, by the schedule; no access to shared memory may meet a
        bank conflict."""
        conflicts = (ctypes.c_long * 2)()
        flags = self.schedule.backwards, self.schedule.late
        error = self._run(
            ctypes.byref(arguments), grid[0], block[0], shared_bytes, *flags, conflicts
        )
        assert not error, error.decode()
        assert conflicts[0] == 0, "bank conflicts of matrix loads"
        assert conflicts[1] == 0 or not self.copies_apart, "bank conflicts of copies"


@dataclass(frozen=True)
class Choice:
    """One build, and the variant that it belongs to.

    arch: whose number `__CUDA_ARCH__` is, in tenths; 0: of none that a source names.
    """

    name: str
    config: int
    dtype: str
    head_dim: int
    kind: str = "full"
    storage: str = "strided"
    arch: int = 0

    @property
    def variant(self) -> Variant:
        """The variant: "float16" products in "float16-narrow" accumulators are one of its own."""
        module = MODULES[self.name]
        return module.VARIANT_F16 if self.narrow else module.VARIANT

    @property
    def narrow(self) -> bool:
        return self.dtype.endswith("-narrow")

    @property
    def format(self) -> str:
        return self.dtype.removesuffix("-narrow")

    @property
    def build(self) -> tuple[Config, str, int, str, str]:
        config = self.variant.configs[self.config]
        return config, self.format, self.head_dim, self.kind, self.storage


class Placed:
    """A tensor as a storage has it, in an allocation full of something else that must stay: of 7,
    or of `BESIDE`, which a copy must not read."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        storage: Storage,
        dtype: torch.dtype,
        *,
        guarded: bool = False,
    ) -> None:
        piece = storage.pieces(shape)[""]
        self.whole = torch.full((max(piece.extent, 0) + piece.behind + 128,), 7.0, dtype=dtype)
        if guarded:
            self.whole.view(torch.uint8).fill_(BESIDE & 0xFF)
        place = piece.shape, piece.strides, piece.offset + 64
        self.tensor = self.whole.as_strided(*place)
        self.outside = torch.ones_like(self.whole, dtype=torch.bool)
        self.outside.as_strided(*place).fill_(False)
        self.before = self.whole.clone()

    def untouched(self) -> bool:
        """Whether nothing outside the tensor has changed."""
        return torch.equal(self.whole[self.outside], self.before[self.outside])


@cache
def inputs_of(problem: Problem, *, spoiled: int = 0) -> tuple[Placed, ...]:
    """Q, K and V as a kernel gets them.

    spoiled: keys of a block, or 0.  K and V are NaN behind the last key that any row of their
    sequence sees, and in the blocks before that of the first one.
    """
    made = tensors(problem)
    lows, highs = problem.mask.row_bounds(problem.batch, problem.seqlen_q, problem.seqlen_kv)
    seen = lows < highs
    firsts = lows.masked_fill(~seen, problem.seqlen_kv)
    placed = []
    for name in ("q", "k", "v"):
        values = getattr(made, name)
        if spoiled and name != "q":
            values = values.clone()
            for batch in range(problem.batch):
                first = min(firsts[batch].tolist(), default=0)
                values[batch, :, max(highs[batch].tolist(), default=0) :] = torch.nan
                values[batch, :, : first // spoiled * spoiled] = torch.nan
        copy = Placed(tuple(values.shape), problem.layouts[name], values.dtype, guarded=True)
        problem.layouts[name].write(values, {"": copy.tensor})
        placed.append(copy)
    return tuple(placed)


@cache
def descales_of(problem: Problem) -> Descales | None:
    """The factors as a kernel gets them, or None."""
    word = problem.quantisation.word
    stored = stored_factors(problem).values()
    seen = [factors.expand(problem.shape_k[:2]) for factors in stored]
    return Descales(*seen, quantisation=word) if seen else None


def run(
    variant: Variant, problem: Problem, config: Config, *, spoiled: bool = False
) -> tuple[Tensor, Tensor]:
    """O and LSE from the shipped entry point, of the `inputs_of`; asserts that it wrote these and
    nothing else."""
    assert config.block_n is not None
    placed = inputs_of(problem, spoiled=config.block_n) if spoiled else inputs_of(problem)
    inputs = dict(zip("qkv", placed, strict=True))
    stored = {}
    given = {}
    for name, placed in inputs.items():
        shape, storage = problem.shapes[name], problem.layouts[name]
        if storage.word == STRIDED:
            given[name] = placed.tensor.expand(shape)
        else:
            given[name] = torch.empty(shape, dtype=placed.tensor.dtype, device="meta")
            held = {"": placed.tensor}
            stored[name] = Stored(storage.word, storage.name, held, storage.holds)
    out = Placed(problem.shape_out, problem.layouts["out"], problem.format_out.torch)
    lse = Placed((*problem.shape_q[:3], 1), Layout(), torch.float32)
    out.tensor.fill_(torch.nan)
    lse.tensor.fill_(torch.nan)
    args = AttentionArgs(
        **given,
        mask=problem.mask,
        softmax_scale=problem.scale,
        score_mod=problem.score_mod,
        config=config,
        descales=descales_of(problem),
        stored=stored,
    )
    assert variant.forward is not None
    variant.forward(args, out.tensor, lse.tensor[..., 0], {})
    assert out.untouched(), "written outside"
    assert lse.untouched(), "written outside"
    return out.tensor.clone(), lse.tensor[..., 0].clone()


def convict(
    variant: Variant, problem: Problem, config: Config, out: Tensor, lse: Tensor, arch: str = ""
) -> str | None:
    """What is wrong with O and LSE, or None: the judge's own bound, and empty rows.

    arch: whose units the bound is of; by default the most exact that the variant runs on.
    """
    arch = arch or ("sm_80" if variant.support.capability == (8, 0) else "sm_120")
    arithmetic = resolve(variant.numerics, config, problem, arch)
    truth = compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])
    live = ~truth.empty
    if out[truth.empty].count_nonzero() or not torch.equal(lse == -torch.inf, truth.empty):
        return "empty rows"
    ratio_out = compare(out, truth.out, truth.out_bound, problem.format_out).ratio[live]
    ratio_lse = compare(
        lse, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
    ).ratio[live]
    known = needed(truth, out, problem.format_out)[live]
    for name, ratio in (("O", ratio_out), ("LSE", ratio_lse), ("O as known", known)):
        if ratio.numel() and not float(ratio.max()) <= 1:
            return f"{name}: {float(ratio.max()):.3g} of its bound"
    return None


def stored(choice: Choice, pitch: int) -> dict[str, Any]:
    """Where K lies, unless it is strided: in rows of keys with that pitch."""
    return {} if choice.storage == "strided" else {"layout_k": Transposed(pitch)}
