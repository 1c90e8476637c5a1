"""The CuTe kernel without a GPU: its declarations, its headers, its builds, and its own source run
on the CPU.

For the last, a host compiler reads kernels/cute/flash_forward.cu with CuTe's own layouts, swizzles
and partitions; only the bodies of the atoms that hold inline assembly are replaced, by the
functions of tests/harness/cuda_host.  Warps run as unfairly as barriers allow, and copies land at
once or as late as waits allow, so that a barrier or a wait too few shows: each is dropped.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cute import family
from kernels.cute import flash_forward as kernel
from kernels.masks import mask_build
from references.masks import parse_mask
from references.score_mods import Softcap
from tests.harness.cute_builds import sources
from tests.harness.cute_cases import MASKS, SHAPES
from tests.harness.cute_faults import FAULTS
from tests.harness.cute_forward_trial import HostTrial
from tests.harness.cute_host import (
    BUILDS,
    CHOICES,
    ORDERS,
    SMALL,
    SOURCE,
    TALL,
    UNEVEN,
    Program,
    compiled,
    has_headers,
    has_host,
    library_of_all,
)
from tests.harness.cute_verdicts import convicting, convicting_apart
from verify.bundle import ROOT
from verify.cuda.compile import CompileError, compilable
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config, Unsupported, compiled_archs


def arguments(problem: Problem, config: Config = SMALL) -> AttentionArgs:
    inputs = tensors(problem)
    return AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, config
    )


# Declarations.


def test_every_head_dim_is_built_for_hopper_and_two_elsewhere() -> None:
    names = {arch: [build.name for build in kernel.builds(arch)] for arch in compiled_archs()}
    hopper = names["sm_90a"]
    assert {name.rpartition("-d")[2] for name in hopper} == {str(d) for d in family.HEAD_DIMS}
    for config in kernel.CONFIGS:
        for dtype in family.ELEMENTS:
            assert any(name.startswith(f"{config.name}-{dtype}-") for name in hopper)
    for arch, chosen in names.items():
        assert chosen[:2] == hopper[:2]
        assert len(chosen) == (len(hopper) if arch == "sm_90a" else 2)
    for part in ("m64", "m128", "-float16", "-bfloat16"):
        assert any(part in name for name in names["sm_80"])
    assert kernel.builds("sm_75") == []


@pytest.mark.parametrize("head_dim", family.HEAD_DIMS)
@pytest.mark.parametrize("config", kernel.CONFIGS, ids=lambda config: config.name)
def test_shared_memory_fits_its_architectures(config: Config, head_dim: int) -> None:
    made = kernel.launch(config, "float16", head_dim, "")
    everywhere = config is TALL or head_dim <= 128
    assert made.shared_bytes <= (99 if everywhere else 163) * 1024
    assert made.block_m == (64 if config is SMALL or head_dim > 128 else 128)


@pytest.mark.parametrize("head_dim", kernel.FAMILY_D64.support.head_dims)
def test_two_blocks_for_small_head_dims_share_a_multiprocessor(head_dim: int) -> None:
    made = kernel.launch(*kernel.CONFIGS_D64, "float16", head_dim, "")
    assert made.block_m == 128
    assert made.shared_bytes <= 99 * 1024  # as of every architecture
    assert 2 * (made.shared_bytes + 1024) <= 164 * 1024  # of an A100's multiprocessor


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("full", lambda r: 9), ("causal", lambda r: r + 5), ("causal.tl", lambda r: r + 1)],
    ids=["full", "causal", "causal.tl"],
)
def test_a_mask_is_a_diagonal(mask: str, expected: Callable[[int], int]) -> None:
    args = arguments(
        Problem(seqlen_q=5, seqlen_kv=9, head_dim=64, dtype="float16", mask=parse_mask(mask))
    )
    assert [min(9, r + mask_build(args).diagonal_high + 1) for r in range(5)] == [
        expected(r) for r in range(5)
    ]


PLAIN = Problem(seqlen_q=4, seqlen_kv=4, head_dim=64, dtype="float16")


@pytest.mark.parametrize(
    ("problem", "argument"),
    [
        (replace(PLAIN, dtype="float32"), "dtype"),
        (replace(PLAIN, head_dim=80), "head_dim"),
        (replace(PLAIN, head_dim=288), "head_dim"),
        (replace(PLAIN, score_mod=Softcap(1.0)), "softcap"),
    ],
    ids=lambda value: value.name if isinstance(value, Problem) else value,
)
def test_what_it_does_not_support_it_refuses(problem: Problem, argument: str) -> None:
    args = arguments(problem)
    refused(args, torch.empty_like(args.q), argument)


def test_layouts_that_it_does_not_support_it_refuses() -> None:
    args = arguments(PLAIN)
    out = torch.empty_like(args.q)
    odd = torch.empty(1, 1, 4, 68, dtype=torch.float16)[..., :64]  # rows of 136 bytes
    across = torch.empty(1, 1, 64, 8, dtype=torch.float16)[..., :4].mT
    for layout in (odd, across):
        for name in ("q", "k", "v"):
            refused(replace(args, **{name: layout}), out, f"layout_{name}")
        refused(args, layout, "layout_out")
    refused(replace(args, config=replace(SMALL, block_m=192)), out, "config")


def refused(args: AttentionArgs, out: Tensor, argument: str) -> None:
    with pytest.raises(Unsupported) as error:
        kernel.FAMILY.forward(args, out, torch.empty(out.shape[:3]), {})
    assert error.value.argument == argument


# Headers.


@pytest.mark.parametrize("inside", ["", "include"])
def test_cutlass_path_comes_first(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / inside / "cute").mkdir(parents=True)
    (tmp_path / inside / "cute" / "tensor.hpp").touch()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert family.headers() == tmp_path / inside


def test_a_cutlass_path_without_headers_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    package = family.headers()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert family.headers() == package


def test_without_headers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(family.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(family, "cuda_available", lambda: None)
    assert "CUTLASS_PATH" in (family.available() or "")
    with pytest.raises(CompileError, match="CUTLASS_PATH"):
        kernel.builds("sm_90a")[0].compile()
    monkeypatch.setattr(family, "cuda_available", lambda: "no CUDA device")
    assert family.available() == "no CUDA device"


def test_without_cccl_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "cuda_available", lambda: None)
    monkeypatch.setattr(family, "headers", lambda: tmp_path)
    monkeypatch.setattr(family, "toolkit_includes", lambda: (tmp_path,))
    assert "nvidia-cuda-cccl" in (family.available() or "")


def test_a_stored_transpose_it_refuses() -> None:
    problem = Problem.parse("sq=4,skv=4,dtype=float16,d=64,lk=transposed.p64")
    refusal = family.SUPPORT.refusal(problem)
    assert refusal is not None
    assert refusal[0] == "layout_k"


@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.for_ci
def test_the_largest_build_does_not_spill() -> None:
    (build,) = [
        build for build in kernel.builds("sm_90a") if build.name == f"{TALL.name}-float16-d128"
    ]
    resources = build.compile().resources
    assert resources.registers <= 255
    assert resources.shared == kernel.launch(TALL, "float16", 128, "").shared_bytes
    assert resources.stack == resources.spill_stores == resources.spill_loads == 0


# Two builds have every shape, and are compiled apart from the others: all of the first tier.
WHOLE = ("d32", "d96")
FURTHER = tuple(name for name in BUILDS if name not in WHOLE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(tmp_path_factory, "cute", lambda folder: compiled(folder, WHOLE))


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(tmp_path_factory, "cute-more", lambda folder: compiled(folder, FURTHER))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A build whose keys of a step do not divide the rows of a tile."""
    library = library_of_all(
        tmp_path_factory, "cute-uneven", lambda folder: compiled(folder, [UNEVEN])
    )
    return named(library, UNEVEN)


# A fault of `d32`, a problem that shows it, and the oracles that convict it there.
FAULTY = {
    "a table ignored": ("b=2,sq=80,skv=130,mask=lengths.70_0.100_33", "bound empty_rows poison"),
    "steps not clamped to the keys": ("sq=40,skv=50", "bound"),
    "a step taken for whole": ("sq=70,skv=131,mask=causal", "bound poison"),
    "the first step passed over": ("sq=30,skv=131,mask=window.20.9", "bound"),
    "keys below a band": ("sq=140,skv=300,mask=window.20.9", "bound poison"),
    "a key too many": ("sq=70,skv=131,mask=causal", "bound poison"),
    "no mask": ("sq=70,skv=131,mask=causal", "bound poison"),
    "no end of rows": ("b=2,sq=80,skv=130,mask=lengths.70_0.100_33", "memory"),
    "no end of the rows of LSE": ("sq=70,skv=131,mask=causal", "memory"),
    "P of the bits of float16": ("sq=70,skv=131,mask=causal", "bound"),
    "P rounded to float16 first": ("sq=70,skv=131,mask=causal", "bound"),
    "LSE of an empty row is +inf": ("sq=130,skv=70,mask=causal", "empty_rows"),
}
OF_UNEVEN = "steps counted by tiles of rows"  # no fault of other builds
TABLE = ROOT / "docs" / "cute.md"
CASES = [(name, shape) for name in WHOLE for shape in MASKS + SHAPES]


def named(library: ctypes.CDLL, name: str) -> Program:
    entry = library[f"run_{name}"]
    entry.restype = ctypes.c_char_p
    return Program(library, entry, *CHOICES[name])


def without_conflicts(program: Program) -> None:
    assert program.run(program.problem("sq=66,skv=66")).conflicts == (0, 0)


@has_headers
@has_host
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def sound(self, library: ctypes.CDLL) -> Iterator[None]:
        library.weaken(0, False)
        library.plant(-1)
        yield
        library.weaken(0, False)
        library.plant(-1)

    @pytest.mark.parametrize(("name", "shape"), CASES)
    def test_it_stays_inside_its_bounds(self, library: ctypes.CDLL, name: str, shape: str) -> None:
        assert max(named(library, name).verdict(shape, ORDERS)) <= 1

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", FURTHER)
    @pytest.mark.parametrize("shape", MASKS)
    def test_it_does_at_further_head_dims(
        self, further: ctypes.CDLL, name: str, shape: str
    ) -> None:
        assert max(named(further, name).verdict(shape, ORDERS[-1:])) <= 1

    @pytest.mark.parametrize("name", WHOLE)
    def test_shared_memory_has_no_bank_conflicts(self, library: ctypes.CDLL, name: str) -> None:
        without_conflicts(named(library, name))

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", FURTHER)
    def test_nor_at_further_head_dims(self, further: ctypes.CDLL, name: str) -> None:
        without_conflicts(named(further, name))

    @pytest.mark.parametrize("columns", [32, 96])
    def test_pieces_of_32_columns_need_their_swizzle(
        self, library: ctypes.CDLL, columns: int
    ) -> None:
        assert conflicts(library.place_right, columns) == 0
        assert conflicts(library.place_wrong, columns) > 0
        assert conflicts(library.place_right, 128) == conflicts(library.place_wrong, 128) == 0

    @pytest.mark.parametrize("fault", FAULTY)
    def test_planted_faults_are_caught(self, library: ctypes.CDLL, fault: str) -> None:
        program = named(library, "d32")
        shape, oracles = FAULTY[fault]
        assert convicting(HostTrial.of(program, shape)) == ()
        library.plant([*FAULTS].index(fault))
        assert convicting(HostTrial.of(program, shape)) == tuple(oracles.split())

    @pytest.mark.thorough
    def test_steps_that_do_not_divide_a_tile(self, uneven: Program) -> None:
        problem = "sq=70,skv=131,mask=causal"
        uneven.library.plant(-1)
        assert not any(convicting(HostTrial.of(uneven, shape)) for shape in MASKS + SHAPES)
        uneven.library.plant([*FAULTS].index(OF_UNEVEN))
        assert convicting(HostTrial.of(uneven, problem)) == ("bound",)

    @pytest.mark.thorough
    @pytest.mark.parametrize("row", FAULTS)
    def test_as_often_as_the_table_says(
        self, library: ctypes.CDLL, uneven: Program, row: str
    ) -> None:
        program = uneven if row == OF_UNEVEN else named(library, "d32")
        program.library.plant([*FAULTS].index(row))
        counts = Counter(
            oracle
            for shape in MASKS + SHAPES
            for oracle in convicting_apart(partial(HostTrial.of, program, shape))
        )
        told = ", ".join(f"{oracle} {count}" for oracle, count in sorted(counts.items()))
        assert f"| {row} | {told} |" in TABLE.read_text(encoding="utf-8")
        if row == OF_UNEVEN:
            library.plant([*FAULTS].index(row))
            others = [HostTrial.of(named(library, "d32"), shape) for shape in MASKS + SHAPES]
            assert not any(convicting(trial) for trial in others)

    def test_every_fault_has_its_problem(self) -> None:
        assert {*FAULTY, OF_UNEVEN} == set(FAULTS)

    def test_keys_that_no_row_of_a_tile_sees_are_not_read(self, library: ctypes.CDLL) -> None:
        program = named(library, "d32")
        problem = program.problem("b=2,sq=64,skv=200,mask=lengths.64_64.70_0")
        assert not program.run(problem, hidden=math.nan).out.isnan().any()

    def test_every_barrier_and_every_wait_is_needed(self, library: ctypes.CDLL) -> None:
        program = named(library, "d32")
        lines = [
            n
            for n, line in enumerate(SOURCE.read_text().splitlines(), 1)
            if "__syncthreads();" in line
        ]
        for line, hasty in [*((line, False) for line in lines), (0, True)]:
            library.weaken(line, hasty)
            noticed = any(
                ratio > 1
                for shape in ("sq=130,skv=200", "sq=130,skv=0")
                for ratio in program.verdict(shape)
            )
            assert noticed, (
                f"without line {line}" if line else "with waits that leave one group more in flight"
            )


def conflicts(place: Callable[[int, int, int], int], columns: int) -> int:
    """How often two of eight rows' chunks of 16 bytes, in one column, lie in the same banks."""
    found = 0
    for first in range(0, 32, 8):
        for column in range(0, columns, 8):
            banks = [place(columns, first + row, column) // 8 % 8 for row in range(8)]
            found += len(banks) - len(set(banks))
    return found


def test_builds_made_ahead_are_those_that_are_launched() -> None:
    ahead = sources()
    for config, dtype, head_dim in product(kernel.CONFIGS, family.ELEMENTS, family.HEAD_DIMS):
        assert kernel.launch(config, dtype, head_dim, "").source in ahead
    assert len(ahead) == 168
    assert {source.path.name for source in ahead} == {
        *("flash_forward.cu", "hopper_forward.cu", "hopper_fp8_forward.cu", "flash_backward.cu"),
        "row_sums.cu",
    }
