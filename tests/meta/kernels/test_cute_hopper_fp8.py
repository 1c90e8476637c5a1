"""The CuTe forward of 8-bit inputs for Hopper: declarations, tensor maps and builds."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from kernels.cute import hopper_forward, hopper_maps
from kernels.cute import hopper_fp8_forward as kernel
from references.score_mods import Softcap
from tests.harness.cute_hopper_fp8_host import (
    LARGE,
    SMALL,
)
from tests.harness.cute_hopper_host import instructions
from tests.harness.cute_host import has_headers
from verify.cuda.compile import LaunchError, compilable
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config, Unsupported, compiled_archs

E4M3 = torch.float8_e4m3fn
PLAIN = Problem(seqlen_q=4, seqlen_kv=4, head_dim=64, dtype=kernel.DTYPE)


def arguments(problem: Problem, config: Config = SMALL) -> AttentionArgs:
    inputs = tensors(problem)
    return AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, config
    )


# Declarations.


def test_both_are_built_for_hopper_alone() -> None:
    for variant in kernel.VARIANTS:
        assert variant.builds is not None
        names = {arch: [build.name for build in variant.builds(arch)] for arch in compiled_archs()}
        assert [arch for arch in names if names[arch]] == ["sm_90a"]
        for part in (SMALL.name, LARGE.name, "d64", "d128", "d256"):
            assert any(part in name for name in names["sm_90a"])


def test_they_differ_in_promotion_alone() -> None:
    promoted, chained = (variant.numerics for variant in kernel.VARIANTS)
    assert promoted.products.promotions(64) == (0, 64)
    assert chained.products.promotions(64) == (0, 0)
    assert replace(promoted, products=chained.products) == chained


@pytest.mark.parametrize(
    ("config", "head_dim", "slots"), [(SMALL, 64, 2), (LARGE, 128, 2), (LARGE, 256, 2)]
)
def test_the_rings_have_the_slots_that_fit(config: Config, head_dim: int, slots: int) -> None:
    made = kernel.launch(config, kernel.DTYPE, head_dim, "")
    assert ("STAGES", str(slots)) in made.source.defines
    assert made.shared_bytes <= hopper_forward.ROOM
    assert made.shared_bytes >= head_dim * (128 + 3 * slots * (config.block_n or 0))


@pytest.mark.parametrize(
    ("problem", "argument"),
    [
        (replace(PLAIN, dtype="float16"), "dtype"),
        (replace(PLAIN, dtype="float8_e5m2"), "dtype"),
        (replace(PLAIN, head_dim=96), "head_dim"),
        (replace(PLAIN, score_mod=Softcap(1.0)), "softcap"),
    ],
    ids=lambda value: value.name if isinstance(value, Problem) else value,
)
def test_what_they_do_not_support_they_refuse(problem: Problem, argument: str) -> None:
    args = arguments(problem)
    out = torch.empty(args.q.shape, dtype=torch.bfloat16)
    for variant in kernel.VARIANTS:
        assert variant.forward is not None
        with pytest.raises(Unsupported) as error:
            variant.forward(args, out, torch.empty(out.shape[:3]), {})
        assert error.value.argument == argument


# Tensor maps.


@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (128, 128), (256, 128)])
def test_a_box_is_as_wide_as_its_swizzle(head_dim: int, columns: int) -> None:
    tensor = torch.empty(2, 5, 3, head_dim, dtype=E4M3).transpose(1, 2)  # bshd in memory
    made = hopper_maps.tensor_map("k", tensor, 64)
    assert made.dims == (head_dim, 5, 3, 2)
    assert made.strides == (3 * head_dim, head_dim, 5 * 3 * head_dim)
    assert made.box == (columns, 64, 1, 1)


@pytest.mark.parametrize(("width", "swizzle"), [(64, 2), (128, 3)])
def test_the_driver_is_told_all_of_a_map(
    width: int, swizzle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def driver(*values: object) -> int:
        given.extend(list(v) if isinstance(v, ctypes.Array) else v.value for v in values)
        return 0

    monkeypatch.setattr(hopper_maps, "_encoder", lambda: driver)
    dims = (128, 5, 3, 2)
    made = hopper_maps.TensorMap(kernel.DTYPE, 4096, dims, (128, 640, 1920), (width, 32, 1, 1))
    hopper_maps.encode(made, 128)
    arrays = [[*dims], [128, 640, 1920], [width, 32, 1, 1], [1, 1, 1, 1]]
    assert given == [128, 0, 4, 4096, *arrays, 0, swizzle, 3, 0]
    with pytest.raises(LaunchError, match="64"):
        hopper_maps.encode(made, 80)


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_maps, "_encoder", lambda: lambda *values: 1)
    monkeypatch.setattr(hopper_maps, "_words", lambda status: f"error {status}")
    made = hopper_maps.tensor_map("k", torch.empty(1, 1, 4, 64, dtype=E4M3), 64)
    with pytest.raises(LaunchError, match="error 1"):
        hopper_maps.encode(made, 128)


def test_the_drivers_numbers_are_those_of_its_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert (
        int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8)
        == hopper_maps._TYPES[kernel.DTYPE]
    )
    swizzles = driver.CUtensorMapSwizzle
    assert int(swizzles.CU_TENSOR_MAP_SWIZZLE_64B) == hopper_maps._SWIZZLES[64]
    assert int(swizzles.CU_TENSOR_MAP_SWIZZLE_128B) == hopper_maps._SWIZZLES[128]


def test_maps_lie_where_the_driver_and_the_kernel_want_them() -> None:
    made = hopper_maps.aligned(kernel.Arguments)
    for name in "qkv":
        field = getattr(kernel.Arguments, f"map_{name}")
        assert (ctypes.addressof(made) + field.offset) % 64 == field.offset % 64 == 0
        assert field.size == 128


# Builds.


@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_a_build_has_hoppers_instructions_and_no_spill() -> None:
    (build,) = [
        b for b in kernel.PROMOTED.builds("sm_90a") if b.name == f"{LARGE.name}-{kernel.DTYPE}-d128"
    ]
    text = instructions(build)
    for instruction in (
        "QGMMA.64x128x32.F32.E4M3.E4M3",
        "UTMALDG.4D",
        "LDSM.16.MT88.4",
        "STSM.16.M88.4",
        "USETMAXREG",
        "FENCE.VIEW.ASYNC",
    ):
        assert instruction in text
