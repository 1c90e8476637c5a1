"""The raw-PTX kernel on trial without a GPU: its builds, and its own source run by a host
compiler's code.

`cuda_host` runs a block's 128 threads as fibers, its warps as unfairly as can be (each as far as it
gets, the first or the last first; copies that land at once, or as late as they may), on shared
memory of NaN, and counts bank conflicts.  What is judged is split_q.cu itself, launched by its own
`forward`: only ptx.cuh and the launch are replaced.
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

from kernels.ptx import split_q
from kernels.ptx.split_q import CONFIGS, HEAD_DIMS, VARIANT
from references.masks import Causal, Full
from references.score_mods import Softcap
from verify.arithmetic.dtypes import dtype_named
from verify.bundle import ROOT
from verify.cuda.compile import Source, compilable
from verify.judging.comparison import compare
from verify.judging.truth import compute_truth
from verify.problem import Layout, Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import AttentionArgs, Config, Unsupported

torch.set_num_threads(1)

HOST = ROOT / "tests" / "harness" / "cuda_host"
SHARED_LIMIT = 99 * 1024  # per block on sm_86, sm_89 and sm_120
COMPILER = shutil.which("c++")
compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
runs = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


# Builds.


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_build_compiles_without_spilling(arch: str) -> None:
    builds = split_q.builds(arch)
    assert len({build.name for build in builds}) == len(builds) == 16
    for build in builds:
        resources = build.compile()
        assert resources.spill_stores == resources.spill_loads == resources.stack == 0, build.name
        assert 0 < resources.shared <= SHARED_LIMIT, build.name


# The kernel on the CPU.


@dataclass(frozen=True)
class Schedule:
    """In which order a block's warps run, and when their copies land."""

    backwards: bool
    late: bool


SCHEDULES = [Schedule(*choice) for choice in itertools.product((False, True), repeat=2)]


class Host:
    """A source compiled for the CPU, with a text of it replaced."""

    def __init__(
        self, source: Source, folder: Path, edit: Callable[[str], str] = lambda text: text
    ) -> None:
        kernel = folder / "kernel.cu"
        kernel.write_text(edit(source.path.read_text(encoding="utf-8")), encoding="utf-8")
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
        assert list(conflicts) == [0, 0], "bank conflicts of matrix loads and of copies"


@pytest.fixture
def host(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes `split_q.forward` run on the CPU: hosts(...) gives the `Host` of a build, which forward
    then launches."""
    current: list[Host] = []

    def hosts(
        config: Config,
        dtype: str,
        head_dim: int,
        causal: bool,
        edit: Callable[[str], str] = lambda text: text,
    ) -> Host:
        source = split_q.source(config, dtype, head_dim, causal)
        current[:] = [Host(source, tmp_path_factory.mktemp("host"), edit)]
        return current[0]

    monkeypatch.setattr(split_q, "_kernel", lambda *build: current[0])
    monkeypatch.setattr(split_q, "device_arch", lambda device: "host")
    monkeypatch.setattr(split_q, "launch", lambda kernel, *rest: kernel.launch(*rest))
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


def run(problem: Problem, config: Config) -> tuple[Tensor, Tensor]:
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
    VARIANT.forward(args, out.tensor, lse.tensor[..., 0], {})
    assert out.untouched()
    assert lse.untouched()
    return out.tensor.clone(), lse.tensor[..., 0].clone()


def convict(problem: Problem, config: Config, out: Tensor, lse: Tensor) -> str | None:
    """What is wrong with O and LSE, or None: the judge's own bound, and empty rows."""
    arithmetic = resolve(VARIANT.numerics, config, problem, "sm_80")
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
SHAPES: dict[bool, list[dict[str, Any]]] = {
    False: [
        {"batch": 2, "heads_q": 2, "heads_kv": 1, "seqlen_q": 70, "seqlen_kv": 133, **WIDE},
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
    True: [
        {
            "batch": 2,
            "heads_q": 2,
            "heads_kv": 1,
            "seqlen_q": 66,
            "seqlen_kv": 150,
            "mask": Causal(),
            **WIDE,
        },
        {"seqlen_q": 130, "seqlen_kv": 65, "mask": Causal(), "distribution": "increasing"},
        {"seqlen_q": 40, "seqlen_kv": 100, "mask": Causal("tl"), "softmax_scale": -0.1},
        {"seqlen_q": 70, "seqlen_kv": 3, "mask": Causal("tl")},
    ],
}
# Every pair of choices among dtype, head dim, config and mask, in half of all builds.
HALF = [
    choice
    for choice in itertools.product(range(2), repeat=4)
    if sum(choice) % 2 == 0  # the fourth is the parity of the others
]


@runs
@pytest.mark.parametrize("choice", HALF, ids=str)
def test_the_source_computes_attention(choice: tuple[int, ...], host: Any) -> None:
    dtype, dim = VARIANT.support.dtypes[choice[0]], HEAD_DIMS[choice[1]]
    config, causal = CONFIGS[choice[2]], bool(choice[3])
    kernel = host(config, dtype, dim, causal)
    for shape, schedule in zip(SHAPES[causal], itertools.cycle(SCHEDULES), strict=False):
        problem = Problem(**shape, head_dim=dim, dtype=dtype, seed=sum(choice))
        kernel.schedule = schedule
        assert convict(problem, config, *run(problem, config)) is None, problem.name


@runs
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_no_schedule_changes_a_bit(config: Config, host: Any) -> None:
    kernel = host(config, "float16", 64, False)
    problem = Problem(seqlen_q=64, seqlen_kv=200, head_dim=64, dtype="float16")
    results = []
    for kernel.schedule in SCHEDULES:
        results.append(run(problem, config))
    assert convict(problem, config, *results[0]) is None
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


# One thing removed or changed, each time.  Slips of waiting and of barriers show in the schedule
# that they are open to.

BARRIER = r"__syncthreads\(\);(?=  // {}:)"
WAIT = r"cp_async_wait_group<{}>\(\);(?=\s*__syncthreads\(\);  // {}:)"
SLIPS = {
    "barrier before Q": (BARRIER.format("Q"), ""),
    "barrier before S": (BARRIER.format("K"), ""),
    "barrier before P V": (BARRIER.format("V"), ""),
    "wait for Q": (WAIT.format("STAGES", "Q"), "cp_async_wait_group<STAGES + 1>();"),
    "wait for K": (WAIT.format("STAGES - 1", "K"), "cp_async_wait_group<STAGES>();"),
    "wait for V": (WAIT.format("STAGES - 1", "V"), "cp_async_wait_group<STAGES>();"),
    "swizzle": (r"chunk \^ row % 8", "chunk"),
    "stage": (r"k_tiles \+ block % STAGES \* tile_bytes;", "k_tiles;"),
    "tail of keys": (r"block >= whole", "block > whole"),
    "tail of rows": (r"r < a\.seqlen_q", "r <= a.seqlen_q"),
    "transposition": ("ldmatrix_x4_trans", "ldmatrix_x4"),
    "maximum of half a row": (
        r"new_m\[h\] = fmaxf\(new_m\[h\], ptx::shfl_bfly\(new_m\[h\], 2\)\);",
        "",
    ),
    "sum of half a row": (r"l\[h\] \+= ptx::shfl_bfly\(l\[h\], 2\);", ""),
    "rescale": (r"l\[h\] \*= alpha;", ""),
}


@runs
@pytest.mark.parametrize("name", SLIPS)
def test_every_slip_is_seen(name: str, host: Any) -> None:
    """By the bound, by what lies around the outputs, or by bank conflicts."""
    pattern, instead = SLIPS[name]

    def slip(text: str) -> str:
        slipped, count = re.subn(pattern, instead, text)
        assert count == 1
        return slipped

    config = CONFIGS[0]
    kernel = host(config, "float16", 64, False, slip)
    problem = Problem(seqlen_q=63, seqlen_kv=200, head_dim=64, dtype="float16")
    for kernel.schedule in SCHEDULES:
        try:
            found = convict(problem, config, *run(problem, config))
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
        "config": CONFIGS[0],
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
    with pytest.raises(Unsupported) as refusal:
        VARIANT.forward(arguments(**changes), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == argument
    assert (out == 7.0).all()
