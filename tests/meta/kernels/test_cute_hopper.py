"""The Hopper forward without a GPU: its declarations, its tensor maps, one build, and its own
source run on the CPU.

For the last, a host compiler reads kernels/cute/hopper_forward.cu with CuTe's own layouts,
partitions and descriptors; mbarriers, tensor copies and wgmma are those of
tests/harness/cuda_host/hopper.h.  Warps run as unfairly as barriers allow, copies and products
happen at once or as late as waits allow, so that a wait or a barrier too few shows: each is
dropped.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cute import hopper_forward as kernel
from kernels.cute import hopper_maps
from references.masks import parse_mask
from references.score_mods import Softcap
from tests.harness.cute_hopper_host import (
    BUILDS,
    LARGE,
    OVERRUN,
    SMALL,
    SOURCE,
    Program,
    compiled,
    encode,
    instructions,
    waits,
)
from tests.harness.cute_host import has_headers, has_host, library_of_all
from verify.cuda.compile import LaunchError, compilable
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config, Unsupported, compiled_archs

PLAIN = Problem(seqlen_q=4, seqlen_kv=4, head_dim=64, dtype="float16")


def arguments(problem: Problem, config: Config = SMALL) -> AttentionArgs:
    inputs = tensors(problem)
    return AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, config
    )


# Declarations.


def test_it_is_built_for_hopper_alone() -> None:
    names = {arch: [build.name for build in kernel.builds(arch)] for arch in compiled_archs()}
    assert [arch for arch in names if names[arch]] == ["sm_90a"]
    for config in kernel.CONFIGS:
        assert any(name.startswith(f"{config.name}-") for name in names["sm_90a"])
    for part in ("-float16", "-bfloat16", "d64", "d128", "d256"):
        assert any(part in name for name in names["sm_90a"])


@pytest.mark.parametrize(
    ("config", "head_dim", "slots"),
    [(SMALL, 64, 2), (SMALL, 256, 2), (LARGE, 128, 2), (LARGE, 256, 1)],
)
def test_the_ring_has_the_slots_that_fit(config: Config, head_dim: int, slots: int) -> None:
    made = kernel.launch(config, "float16", head_dim, "")
    assert ("STAGES", str(slots)) in made.source.defines
    assert made.shared_bytes <= kernel.ROOM
    assert made.shared_bytes >= 2 * head_dim * 2 * slots * (config.block_n or 0)


@pytest.mark.parametrize(
    ("problem", "argument"),
    [
        (replace(PLAIN, dtype="float32"), "dtype"),
        (replace(PLAIN, head_dim=96), "head_dim"),
        (replace(PLAIN, mask=parse_mask("dense.40.7")), "mask"),
        (replace(PLAIN, score_mod=Softcap(1.0)), "softcap"),
    ],
    ids=lambda value: value.name if isinstance(value, Problem) else value,
)
def test_what_it_does_not_support_it_refuses(problem: Problem, argument: str) -> None:
    args = arguments(problem)
    refused(args, torch.empty_like(args.q), argument)


def test_layouts_and_configs_that_it_does_not_support_it_refuses() -> None:
    args = arguments(PLAIN)
    out = torch.empty_like(args.q)
    odd = torch.empty(1, 1, 4, 68, dtype=torch.float16)[..., :64]  # rows of 136 bytes
    for name in ("q", "k", "v"):
        refused(replace(args, **{name: odd}), out, f"layout_{name}")
    refused(args, odd, "layout_out")
    refused(replace(args, config=replace(SMALL, block_m=192)), out, "config")


def refused(args: AttentionArgs, out: Tensor, argument: str) -> None:
    with pytest.raises(Unsupported) as error:
        kernel.FAMILY.forward(args, out, torch.empty(out.shape[:3]), {})
    assert error.value.argument == argument


# Tensor maps.


def test_a_map_has_four_dimensions_and_boxes_of_a_swizzled_row() -> None:
    tensor = torch.empty(2, 5, 3, 128, dtype=torch.bfloat16).transpose(1, 2)  # bshd in memory
    assert hopper_maps.tensor_map("k", tensor, 64) == hopper_maps.TensorMap(
        dtype="bfloat16",
        address=tensor.data_ptr(),
        dims=(128, 5, 3, 2),
        strides=(2 * 3 * 128, 2 * 128, 2 * 5 * 3 * 128),
        box=(64, 64, 1, 1),
    )


def test_a_map_of_repeated_heads_has_one() -> None:
    tensor = torch.empty(1, 1, 7, 64, dtype=torch.float16).expand(3, 2, 7, 64)
    made = hopper_maps.tensor_map("v", tensor, 128)
    assert made.dims == (64, 7, 1, 1)
    # The driver takes no stride of 0, nor one that 16 bytes do not divide.
    assert all(stride > 0 and stride % 16 == 0 for stride in made.strides)


def test_a_stride_that_no_index_uses_is_not_in_a_map() -> None:
    tensor = torch.empty(70, dtype=torch.float16)[:64].as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert hopper_maps.tensor_map("q", tensor, 128).strides == (128, 128, 128)


def test_a_map_without_rows_lies_elsewhere() -> None:
    made = hopper_maps.tensor_map("k", torch.empty(2, 3, 0, 64, dtype=torch.float16), 64, 4096)
    assert made.address == 4096
    assert made.dims == (64, 1, 3, 2)
    assert all(stride > 0 and stride % 16 == 0 for stride in made.strides)


def test_repeated_rows_are_refused() -> None:
    tensor = torch.empty(1, 1, 1, 64, dtype=torch.float16).expand(1, 1, 7, 64)
    with pytest.raises(Unsupported) as error:
        hopper_maps.tensor_map("v", tensor, 128)
    assert error.value.argument == "layout_v"


@pytest.mark.parametrize("status", [0, 1])
def test_the_driver_is_told_all_of_a_map(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def driver(*values: object) -> int:
        given.extend(list(v) if isinstance(v, ctypes.Array) else v.value for v in values)
        return status

    monkeypatch.setattr(hopper_maps, "_encoder", lambda: driver)
    monkeypatch.setattr(hopper_maps, "_words", lambda status: f"error {status}")
    made = hopper_maps.TensorMap("bfloat16", 4096, (64, 5, 3, 2), (128, 640, 1920), (64, 32, 1, 1))
    if status:
        with pytest.raises(LaunchError, match="error 1"):
            hopper_maps.encode(made, 128)
    else:
        hopper_maps.encode(made, 128)
    arrays = [[64, 5, 3, 2], [128, 640, 1920], [64, 32, 1, 1], [1, 1, 1, 1]]
    assert given == [128, 9, 4, 4096, *arrays, 0, 3, 3, 0]


def test_the_drivers_numbers_are_those_of_its_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    types = driver.CUtensorMapDataType
    assert int(types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16) == hopper_maps._TYPES["float16"]
    assert int(types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) == hopper_maps._TYPES["bfloat16"]
    assert int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE) == 0
    assert int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B) == hopper_maps._SWIZZLES[128]
    promotions = driver.CUtensorMapL2promotion
    assert int(promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B) == hopper_maps._PROMOTE_256B
    fills = driver.CUtensorMapFloatOOBfill
    assert int(fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == hopper_maps._FILL_ZEROS


def test_maps_lie_where_the_driver_and_the_kernel_want_them() -> None:
    for _ in range(8):
        made = hopper_maps.aligned(kernel.Arguments)
        for name in "qkv":
            field = getattr(kernel.Arguments, f"map_{name}")
            assert (ctypes.addressof(made) + field.offset) % 64 == field.offset % 64 == 0
            assert field.size == 128
    with pytest.raises(LaunchError, match="64"):
        hopper_maps.encode(hopper_maps.tensor_map("q", arguments(PLAIN).q, 128), 80)


# Builds.


@pytest.mark.for_ci  # a first look compiles the fp8 kernel, and asks the same of it
@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_a_build_has_hoppers_instructions_and_no_spill() -> None:
    (build,) = (b for b in kernel.builds("sm_90a") if b.name == "m128n128w12s2-float16-d128")
    text = instructions(build)
    for instruction in (
        "HGMMA.64x128x16.F32",
        "UTMALDG.4D",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "USETMAXREG",
        "FENCE.VIEW.ASYNC",
    ):
        assert instruction in text


# The source on the CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(tmp_path_factory, "cute-hopper", compiled)


@pytest.fixture(
    scope="module",
    params=("large", "small", "overlap"),
    ids=lambda name: f"{BUILDS[name][0].name}-{BUILDS[name][1]}-d{BUILDS[name][2]}",
)
def program(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Program:
    return program_of(request.param, library)


def program_of(name: str, library: ctypes.CDLL) -> Program:
    entry = library[f"run_{name}"]
    entry.restype = ctypes.c_char_p
    return Program(library, entry, *BUILDS.get(name, BUILDS["large"]))


SHAPES = (
    "sq=1,skv=1",
    "b=2,sq=70,skv=0",
    "sq=130,skv=300",
    "sq=130,skv=70,mask=causal",
    "sq=140,skv=330,mask=causal",
    "sq=129,skv=33,mask=causal.tl",
    "hq=2,hkv=1,sq=67,skv=150",
    "sq=260,skv=3,mask=causal",
    "sq=65,skv=97,scale=-0.3",
    "sq=140,skv=290,mask=window.70.3",
    "sq=140,skv=290,mask=causal+window.20.inf.tl",
    "b=2,sq=140,skv=210,mask=lengths.140_130.0_200",
    "b=2,sq=140,skv=210,mask=causal+lengths.100_0.200_90",
    "sq=200,skv=200,mask=documents.5_135_60",
    "sq=70,skv=290,mask=prefix.133",
    "sq=140,skv=257,mask=causal,dist=increasing",
    "b=2,hq=2,hkv=1,sq=66,skv=65,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8",
)


DEEP = ("sq=130,skv=400,mask=causal", "sq=66,skv=290,mask=window.160.9")
# In the last block of keys, in the first, and in a block between.
UNSEEN = (
    "sq=70,skv=250,mask=causal.tl",
    "sq=70,skv=390,mask=window.20.3",
    "b=2,sq=40,skv=250,mask=lengths.30_40.67_200",
    "sq=40,skv=200,mask=causal.tl+window.inf.inf",
)


@has_headers
@has_host
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def whole(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(kernel, "encode", encode)
        library.weaken(0, -1, False)
        yield
        library.weaken(0, -1, False)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_stays_inside_its_bounds(self, program: Program, shape: str) -> None:
        assert max(program.verdict(shape)) <= 1

    @pytest.mark.parametrize("shape", DEEP)
    def test_with_four_pieces_and_one_slot_it_stays_inside_its_bounds(
        self, library: ctypes.CDLL, shape: str
    ) -> None:
        assert max(program_of("deep", library).verdict(shape)) <= 1

    @pytest.mark.parametrize(
        ("shape", "blocks"),
        [
            ("sq=70,skv=330", 6),
            ("sq=70,skv=330,mask=causal.tl", 2),
            ("sq=130,skv=330,mask=causal.tl", 2 + 3),  # of two tiles
            ("sq=2,skv=330,mask=window.5.0", 1),  # keys 323 to 329
            ("sq=2,skv=330,mask=window.9.0", 2),  # keys 319 to 329
            ("sq=2,skv=330,mask=lengths.2.0", 0),
        ],
    )
    def test_blocks_that_no_row_sees_are_not_loaded(
        self, library: ctypes.CDLL, shape: str, blocks: int
    ) -> None:
        program = program_of("small", library)
        problem = program.problem(shape)
        program.run(problem, tensors(problem))
        pieces = program.head_dim // hopper_maps.piece(program.head_dim, 2)
        q = pieces * math.ceil(problem.seqlen_q / 128) * (blocks > 0)
        assert library.copied() == q + 2 * pieces * blocks

    def test_one_element_of_lse_too_many_is_seen(self, library: ctypes.CDLL) -> None:
        assert min(program_of(OVERRUN, library).verdict("sq=65,skv=97")) == math.inf

    @pytest.mark.parametrize("shape", UNSEEN)
    def test_nan_that_no_row_sees_stays_out(self, program: Program, shape: str) -> None:
        assert max(program.verdict(shape, spoiled=True)) <= 1

    def test_every_wait_is_needed(self, library: ctypes.CDLL) -> None:
        program = program_of("small", library)
        lines = waits(SOURCE)
        assert len(lines) == 5
        for line in lines:
            library.weaken(line, -1, False)
            assert max(program.verdict("sq=65,skv=330")) > 1, f"without line {line}"
        library.weaken(0, -1, True)
        assert max(program.verdict("sq=65,skv=330")) > 1, "with products still in flight"

    def test_every_named_barrier_is_needed(self, library: ctypes.CDLL) -> None:
        program = program_of("small", library)
        first = 8  # those before are CUTLASS's own
        for named in range(first, first + 3):
            library.weaken(0, named, False)
            worst = max(program.verdict("sq=128,skv=90,mask=lengths.128.70", spoiled=True))
            assert worst > 1, f"without barrier {named}"
