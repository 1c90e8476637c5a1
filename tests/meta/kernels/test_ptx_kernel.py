"""The raw-PTX kernels on trial without a GPU: their builds, and their own sources run by a host
compiler's code.

`cuda_host` runs a block's threads as fibers, its warps as unfairly as can be (each as far as it
gets, the first or the last first; copies that land at once, or as late as they may), on shared
memory of NaN, and counts bank conflicts.  What is judged are the .cu files themselves, launched by
their own `forward`: only ptx.cuh and the launch are replaced.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cuda import family
from kernels.ptx import share_kv, share_qkv, split_kv, split_q, tiling_qk, tiling_qkv
from kernels.ptx.tiling import ELEMENT, HEAD_DIMS, config
from references.masks import Causal, Documents, Full, Lengths, Window
from references.score_mods import Softcap
from verify.arithmetic.dtypes import dtype_named
from verify.bundle import ROOT
from verify.cuda.compile import Source, compilable
from verify.judging.comparison import compare
from verify.judging.truth import compute_truth
from verify.problem import Layout, Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import AttentionArgs, Config, Unsupported, Variant

torch.set_num_threads(1)

HOST = ROOT / "tests" / "harness" / "cuda_host"
COMPILER = shutil.which("c++")
compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
runs = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

ROOM = 227 * 1024  # bytes of shared memory of a block on sm_90

MODULES = {
    module.TILING.name: module
    for module in (split_q, split_kv, share_kv, share_qkv, tiling_qk, tiling_qkv)
}


# What the names promise.


def shared_bytes(name: str, config: Config, head_dim: int) -> int:
    return int(MODULES[name].TILING.shared_bytes(config, head_dim))


def test_one_tile_of_share_qkv_holds_what_four_of_split_q_hold() -> None:
    """At the same blocks and one stage, where a block has twice as many rows as keys."""
    for head_dim in HEAD_DIMS:
        sizes = [
            shared_bytes(name, config(128, 64, 1), head_dim) for name in ("share_qkv", "split_q")
        ]
        assert sizes[1] == 4 * sizes[0]


def test_slices_of_tiling_qk_do_not_grow_with_head_dim() -> None:
    """All that grows is V's tile."""
    chosen = config(64, 32, 2, depth=16)
    rest = {
        shared_bytes("tiling_qk", chosen, head_dim) - 32 * head_dim * ELEMENT
        for head_dim in HEAD_DIMS
    }
    assert len(rest) == 1


def test_tiling_qkv_does_not_grow_with_head_dim() -> None:
    """But P's tile, the maxima and the sums, where several warps share a row."""
    chosen = config(64, 64, 2, depth=16)
    sizes = [shared_bytes("tiling_qkv", chosen, head_dim) for head_dim in HEAD_DIMS]
    assert len(set(sizes)) == 1
    v_slices = 2 * 64 * 64 * ELEMENT  # four warps divide 64 columns
    assert shared_bytes("tiling_qkv", chosen, 512) == v_slices + 64 * (64 * ELEMENT + 4 * 4)
    assert shared_bytes("tiling_qkv", chosen, 1024) == v_slices + 32 * (64 * ELEMENT + 4 * 4)


def test_a_config_that_the_device_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "shared_room", lambda device: 24 * 1024 - 1)
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported, match="24576 bytes of shared memory") as refusal:
        split_q.VARIANT.forward(arguments(), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == "config"
    assert (out == 7.0).all()


# The kernel on the CPU.


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


class Host:
    """A source compiled for the CPU, with a text of it replaced."""

    def __init__(
        self, source: Source, folder: Path, edit: Callable[[str], str] = lambda text: text
    ) -> None:
        # All of a kernel's text but ptx.cuh, in one file.
        text = "".join(
            re.sub(r"(?m)^#(pragma once|include.*)\n", "", path.read_text(encoding="utf-8"))
            for path in (*PARTS, source.path)
        )
        kernel = folder / "kernel.cu"
        kernel.write_text(f"{BEFORE}{edit(text)}", encoding="utf-8")
        library = folder / "kernel.so"
        macros = [*source.defines, ("KERNEL", f'"{kernel}"'), ("ENTRY", source.entry)]
        defines = [f"-D{name}={value}" for name, value in macros]
        flags = [
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
        ]
        subprocess.run(
            [
                str(COMPILER),
                *flags,
                f"-I{HOST}",
                *defines,
                str(HOST / "run.cpp"),
                "-o",
                str(library),
            ],
            check=True,
        )
        self.library = ctypes.CDLL(str(library))
        self.library.run.restype = ctypes.c_char_p
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
        error = self.library.run(
            ctypes.byref(arguments), grid[0], block[0], shared_bytes, *flags, conflicts
        )
        assert not error, error.decode()
        assert conflicts[0] == 0, "bank conflicts of matrix loads"
        assert conflicts[1] == 0 or not self.copies_apart, "bank conflicts of copies"


@dataclass(frozen=True)
class Choice:
    """One build, and the variant that it belongs to."""

    name: str
    config: int
    dtype: str
    head_dim: int
    kind: str = "full"

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
    def build(self) -> tuple[Config, str, int, str]:
        return self.variant.configs[self.config], self.format, self.head_dim, self.kind


@pytest.fixture
def host(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes `forward` run on the CPU: host(choice) gives the `Host` of a build, which forward then
    launches."""
    current: list[Host] = []

    def hosts(choice: Choice, edit: Callable[[str], str] = lambda text: text) -> Host:
        made = MODULES[choice.name].TILING.launch(*choice.build, narrow=choice.narrow)
        current[:] = [Host(made.source, tmp_path_factory.mktemp("host"), edit)]
        return current[0]

    monkeypatch.setattr(family, "_kernel", lambda source, arch: current[0])
    monkeypatch.setattr(family, "device_arch", lambda device: "host")
    monkeypatch.setattr(family, "shared_room", lambda device: ROOM)
    monkeypatch.setattr(family, "launch", lambda kernel, *rest: kernel.launch(*rest))
    return hosts


class Placed:
    """A tensor as a layout has it, in an allocation full of something else that must stay."""

    def __init__(
        self, shape: tuple[int, int, int, int], layout: Layout, dtype: torch.dtype, other: float
    ) -> None:
        self.whole = torch.full((max(layout.extent(shape), 0) + 128,), other, dtype=dtype)
        place = shape, layout.strides(shape), layout.offset + 64
        self.tensor = self.whole.as_strided(*place)
        self.outside = torch.ones_like(self.whole, dtype=torch.bool)
        self.outside.as_strided(*place).fill_(False)
        self.before = self.whole.clone()

    def untouched(self) -> bool:
        """Whether nothing outside the tensor has changed."""
        return torch.equal(self.whole[self.outside], self.before[self.outside])


@cache
def inputs_of(problem: Problem) -> tuple[Placed, ...]:
    made = tensors(problem)
    placed = []
    for name in ("q", "k", "v"):
        values = getattr(made, name)
        copy = Placed(tuple(values.shape), problem.layouts[name], values.dtype, torch.nan)
        copy.tensor.copy_(values)
        placed.append(copy)
    return tuple(placed)


def run(variant: Variant, problem: Problem, config: Config) -> tuple[Tensor, Tensor]:
    """O and LSE from the shipped entry point; asserts that it wrote these and nothing else."""
    inputs = inputs_of(problem)
    q, k, v = (
        x.tensor.expand(getattr(problem, f"shape_{name}"))
        for name, x in zip("qkv", inputs, strict=True)
    )
    out = Placed(problem.shape_q, problem.layouts["out"], problem.format.torch, 7.0)
    lse = Placed((*problem.shape_q[:3], 1), Layout(), torch.float32, 7.0)
    out.tensor.fill_(torch.nan)
    lse.tensor.fill_(torch.nan)
    args = AttentionArgs(q, k, v, problem.mask, problem.scale, problem.score_mod, config)
    assert variant.forward is not None
    variant.forward(args, out.tensor, lse.tensor[..., 0], {})
    assert out.untouched()
    assert lse.untouched()
    return out.tensor.clone(), lse.tensor[..., 0].clone()


def convict(
    variant: Variant, problem: Problem, config: Config, out: Tensor, lse: Tensor
) -> str | None:
    """What is wrong with O and LSE, or None: the judge's own bound, and empty rows."""
    arithmetic = resolve(variant.numerics, config, problem, "sm_80")
    truth = compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])
    live = ~truth.empty
    if out[truth.empty].count_nonzero() or not torch.equal(lse == -torch.inf, truth.empty):
        return "empty rows"
    ratio_out = compare(out, truth.out, truth.out_bound, problem.format_out).ratio[live]
    ratio_lse = compare(
        lse, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
    ).ratio[live]
    for name, ratio in (("O", ratio_out), ("LSE", ratio_lse)):
        if ratio.numel() and not float(ratio.max()) <= 1:
            return f"{name}: {float(ratio.max()):.3g} of its bound"
    return None


PITCHED, ASIDE = Layout("bshd", pitch=8), Layout(pitch=16, offset=8)
WIDE = {
    "layout_q": Layout("bshd"),
    "layout_k": PITCHED,
    "layout_v": Layout("sbhd"),
    "layout_out": PITCHED,
}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "full": [
        {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 70, "seqlen_kv": 133, **WIDE},
        {"seqlen_q": 1, "seqlen_kv": 64, "softmax_scale": -0.25, "distribution": "large_logits"},
        {
            "heads_q": 3,
            "heads_kv": 3,
            "seqlen_q": 16,
            "seqlen_kv": 7,
            "softmax_scale": 0.0,
            "layout_k": ASIDE,
        },
        {"seqlen_q": 5, "seqlen_kv": 0},
        {"seqlen_q": 0, "seqlen_kv": 5},
    ],
    "band": [
        {
            "batch": 2,
            "heads_q": 4,
            "heads_kv": 2,
            "seqlen_q": 66,
            "seqlen_kv": 150,
            "mask": Causal(),
            **WIDE,
        },
        {"seqlen_q": 130, "seqlen_kv": 65, "mask": Causal(), "distribution": "increasing"},
        {"seqlen_q": 40, "seqlen_kv": 100, "mask": Causal("tl"), "softmax_scale": -0.1},
        {"seqlen_q": 70, "seqlen_kv": 3, "mask": Window(20, 1, "tl")},
        {"seqlen_q": 150, "seqlen_kv": 140, "mask": Window(33, 2)},
    ],
    "table": [
        {"batch": 2, "seqlen_q": 70, "seqlen_kv": 130, "mask": Lengths((70, 31), (0, 99))},
        {"seqlen_q": 140, "seqlen_kv": 140, "mask": Causal() & Lengths((129,), (101,)), **WIDE},
        {"seqlen_q": 100, "seqlen_kv": 160, "mask": Documents((90, 70))},
    ],
}
# Each tiling's choices meet every config, dtype, kind of mask and way to accumulate; the head dims
# are those that differ in how rows lie, and in which warps share them.
CHOICES = [
    Choice("split_q", 0, "float16", 64, "full"),
    Choice("split_q", 1, "bfloat16", 96, "band"),
    Choice("split_q", 2, "float16-narrow", 32, "table"),
    Choice("split_q", 3, "bfloat16", 64, "table"),
    Choice("split_kv", 0, "bfloat16", 96, "table"),
    Choice("split_kv", 1, "float16", 64, "band"),
    Choice("split_kv", 2, "float16-narrow", 32, "full"),
    Choice("share_kv", 0, "bfloat16", 64, "band"),
    Choice("share_kv", 1, "float16-narrow", 96, "full"),
    Choice("share_kv", 2, "float16", 32, "table"),
    Choice("share_kv", 3, "bfloat16", 64, "full"),
    Choice("share_qkv", 0, "float16", 32, "band"),
    Choice("share_qkv", 1, "bfloat16", 64, "full"),
    Choice("share_qkv", 2, "float16-narrow", 64, "band"),
    Choice("share_qkv", 3, "float16", 96, "table"),
    Choice("tiling_qk", 0, "float16", 32, "full"),
    Choice("tiling_qk", 0, "bfloat16", 512, "band"),
    Choice("tiling_qk", 1, "float16-narrow", 96, "band"),
    Choice("tiling_qk", 2, "bfloat16", 64, "table"),
    Choice("tiling_qkv", 0, "bfloat16", 64, "table"),
    Choice("tiling_qkv", 1, "float16-narrow", 32, "full"),
    Choice("tiling_qkv", 2, "float16", 96, "band"),
    Choice("tiling_qkv", 3, "float16", 1024, "full"),
]


@runs
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_source_computes_attention(choice: Choice, host: Any) -> None:
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice)
    for shape, schedule in zip(SHAPES[choice.kind], itertools.cycle(SCHEDULES), strict=False):
        problem = Problem(
            **shape, head_dim=choice.head_dim, dtype=choice.format, seed=choice.config
        )
        kernel.schedule = schedule
        assert convict(variant, problem, config, *run(variant, problem, config)) is None, problem


@runs
@pytest.mark.parametrize("name", MODULES)
def test_no_schedule_changes_a_bit(name: str, host: Any) -> None:
    choice = Choice(name, 0, "float16", 64)
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice)
    problem = Problem(seqlen_q=64, seqlen_kv=200, head_dim=64, dtype="float16")
    results = []
    for kernel.schedule in SCHEDULES:
        results.append(run(variant, problem, config))
    assert convict(variant, problem, config, *results[0]) is None
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


# One thing removed or changed, each time, in a tiling that it matters for.  Slips of waiting and of
# barriers show in the schedule that they are open to.  "NAME:3" is config 3; share-qkv's takes two
# pieces of Q.

BARRIER = r"__syncthreads\(\);(?=  // {})"
SLIPS = {
    "barrier before Q": ("split_q", BARRIER.format("Q: its"), ""),
    "barrier before an item, ahead": (
        "split_q",
        r"__syncthreads\(\);(?=  // item: all copies have landed, and)",
        "",
    ),
    "barrier before an item": (
        "share_kv",
        r"__syncthreads\(\);(?=  // item: all copies have landed\n)",
        "",
    ),
    "barrier before a slot": ("share_kv", BARRIER.format("slot"), ""),
    "barrier before the next piece of Q": ("share_qkv:3", BARRIER.format("piece"), ""),
    "barrier before a piece of Q": ("share_qkv:3", BARRIER.format("Q: all"), ""),
    "barrier after Q": ("share_qkv", BARRIER.format("ring"), ""),
    "barrier before maxima": ("split_kv", BARRIER.format("maxima"), ""),
    "barrier before P": ("split_kv", BARRIER.format("P"), ""),
    "barrier before sums": ("split_kv", BARRIER.format("sums"), ""),
    "wait for Q": ("split_q", r"wait_group<ahead>\(\)", "wait_group<ahead + 1>()"),
    "wait for an item, ahead": ("split_q", r"wait_group<ahead - 1>\(\)", "wait_group<ahead>()"),
    "wait for an item": (
        "share_kv",
        r"ptx::cp_async_wait_group<0>\(\);(?=\s*__syncthreads\(\);  // item)",
        "",
    ),
    "wait for a piece of Q": (
        "share_qkv:3",
        r"ptx::cp_async_wait_group<0>\(\);(?=\s*__syncthreads\(\);  // Q)",
        "",
    ),
    "columns of V": ("tiling_qk", r"copy_v\(0\);", ""),
    "slice of Q": ("tiling_qkv", r"q \+ column", "q"),
    "slice of V": ("tiling_qkv", r"v \+ column", "v + 0 * column"),
    "swizzle": ("split_q", r"chunk \^ row / apart % \(8 / apart\)", "chunk"),
    "swizzle of narrow rows": ("tiling_qk", r"chunks % 4 == 0 \? 2 : 4", "1"),
    "slot": ("split_q", r"M::ring \+ read_slot \* M::item", "M::ring"),
    "first masked key": ("split_q", r"masked_from = first\.high", "masked_from = last.high"),
    "last masked key": ("split_q", r"masked_below = last\.low", "masked_below = first.low"),
    "key head of a query head": (
        "split_q",
        r"a\.k\.batch \+ head / a\.group",
        "a.k.batch + head % (a.heads_q / a.group)",
    ),
    "tail of rows": (
        "split_q",
        r"row < a\.seqlen_q && n < out_tiles",
        "row <= a.seqlen_q && n < out_tiles",
    ),
    "transposition": ("split_q", "ldmatrix_x4_trans", "ldmatrix_x4"),
    "maximum of half a row": (
        "split_q",
        r"raised\[i\]\[h\] = fmaxf\(most, ptx::shfl_bfly\(most, 2\)\)",
        "raised[i][h] = most",
    ),
    "maximum of half the warps": (
        "split_kv",
        r"fmaxf\(raised\[i\]\[h\], partial_of\(w",
        "fmaxf(raised[i][h], partial_of(0",
    ),
    "sum of half a row": ("split_q", r"l\[i\]\[h\] \+= ptx::shfl_bfly\(l\[i\]\[h\], 2\);", ""),
    "sum of half the warps": (
        "split_kv",
        r"l\[i\]\[h\] \+= partial_of\(w",
        "l[i][h] += partial_of(0",
    ),
    "rescale": ("split_q", r"l\[i\]\[h\] \*= alpha\[i\]\[h\];", ""),
    "trade of columns": (
        "split_q",
        r"t & bit \? pairs\[low\] : pairs",
        "t & 1 ? pairs[low] : pairs",
    ),
}
MASKED = {"first masked key": Window(None, 10), "last masked key": Window(10, None)}


@runs
@pytest.mark.parametrize("name", SLIPS)
def test_every_slip_is_seen(name: str, host: Any) -> None:
    """By the bound, by what lies around the outputs, or by bank conflicts."""
    tiling, pattern, instead = SLIPS[name]

    def slip(text: str) -> str:
        slipped, count = re.subn(pattern, instead, text)
        assert count == 1
        return slipped

    tiling, _, index = tiling.partition(":")
    mask = MASKED.get(name, Full())
    choice = Choice(tiling, int(index or 0), "float16", 64, "band" if name in MASKED else "full")
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice, slip)
    problem = Problem(
        heads_q=4, heads_kv=2, seqlen_q=63, seqlen_kv=200, head_dim=64, dtype="float16", mask=mask
    )
    for kernel.schedule in SCHEDULES:
        try:
            found = convict(variant, problem, config, *run(variant, problem, config))
        except AssertionError as error:
            found = str(error) or "written outside"
        if found is not None:
            return
    pytest.fail(f"nothing was seen without the {name}")


# Refusals.


def arguments(**changes: Any) -> AttentionArgs:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    given = {
        "q": q,
        "k": q,
        "v": q,
        "mask": Full(),
        "softmax_scale": 0.125,
        "score_mod": None,
        "config": split_q.CONFIGS[0],
    }
    return AttentionArgs(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"config": Config(block_m=64, block_n=16, num_warps=4, num_stages=2)}, "config"),
        ({"k": torch.zeros(1, 1, 8, 65, dtype=torch.float16)[..., 1:]}, "layout_k"),
        ({"v": torch.zeros(1, 1, 64, 8, dtype=torch.float16).mT}, "layout_v"),
        ({"score_mod": Softcap(1.0)}, "softcap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_outside_the_support_is_refused(changes: dict[str, Any], argument: str) -> None:
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported) as refusal:
        split_q.VARIANT.forward(arguments(**changes), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == argument
    assert (out == 7.0).all()
