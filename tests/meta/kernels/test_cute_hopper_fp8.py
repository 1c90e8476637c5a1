"""The CuTe forward of 8-bit inputs for Hopper: declarations and builds; its source on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from kernels.cute import hopper_forward
from kernels.cute import hopper_fp8_forward as kernel
from references.score_mods import Softcap
from tests.harness.cute_hopper_fp8_host import (
    FAULTS,
    LARGE,
    ROLES,
    SMALL,
    SOURCE,
    compiled,
    program_of,
)
from tests.harness.cute_hopper_host import Program, encode
from tests.harness.cute_host import has_headers, has_host
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import declared, trial
from verify.arithmetic.dot import fused_dot
from verify.arithmetic.mma import unit_for
from verify.cuda.compile import LaunchError, compilable
from verify.cuda.sass import NotReadError, listing
from verify.judging.findings import Ruling
from verify.oracles.numerics import oracle as declared_numerics
from verify.problem import Problem
from verify.problem.inputs import Inputs, tensors
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
    assert made.shared_bytes <= kernel.ROOM
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
    made = kernel.tensor_map("k", tensor, 64)
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

    monkeypatch.setattr(hopper_forward, "_encoder", lambda: driver)
    dims = (128, 5, 3, 2)
    made = kernel.TensorMap(kernel.DTYPE, 4096, dims, (128, 640, 1920), (width, 32, 1, 1))
    kernel.encode(made, 128)
    arrays = [[*dims], [128, 640, 1920], [width, 32, 1, 1], [1, 1, 1, 1]]
    assert given == [128, 0, 4, 4096, *arrays, 0, swizzle, 3, 0]
    with pytest.raises(LaunchError, match="64"):
        kernel.encode(made, 80)


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_forward, "_encoder", lambda: lambda *values: 1)
    monkeypatch.setattr(hopper_forward, "_words", lambda status: f"error {status}")
    made = kernel.tensor_map("k", torch.empty(1, 1, 4, 64, dtype=E4M3), 64)
    with pytest.raises(LaunchError, match="error 1"):
        kernel.encode(made, 128)


def test_the_drivers_numbers_are_those_of_its_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8) == kernel._BYTES
    swizzles = driver.CUtensorMapSwizzle
    assert int(swizzles.CU_TENSOR_MAP_SWIZZLE_64B) == kernel._SWIZZLES[64]
    assert int(swizzles.CU_TENSOR_MAP_SWIZZLE_128B) == kernel._SWIZZLES[128]


def test_maps_lie_where_the_driver_and_the_kernel_want_them() -> None:
    made = kernel.aligned_arguments()
    for name in "qkv":
        field = getattr(kernel.Arguments, f"map_{name}")
        assert (ctypes.addressof(made) + field.offset) % 64 == field.offset % 64 == 0
        assert field.size == 128


# Builds.


@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_a_build_has_hoppers_instructions_and_no_spill() -> None:
    (build,) = [b for b in kernel.PROMOTED.builds("sm_90a") if b.name == f"{LARGE.name}-d128"]
    binary = build.compile()
    resources = binary.resources
    assert resources.stack == resources.spill_stores == resources.spill_loads == 0
    # What warpgroups trade: a launch with fewer would wait forever for the consumers' registers.
    assert resources.registers == 168
    try:
        text = listing(binary.cubin)
    except NotReadError as error:
        pytest.skip(str(error))
    for instruction in (
        "QGMMA.64x128x32.F32.E4M3.E4M3",
        "UTMALDG.4D",
        "LDSM.16.MT88.4",
        "STSM.16.M88.4",
        "USETMAXREG",
        "FENCE.VIEW.ASYNC",
    ):
        assert instruction in text


# The source on the CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All builds, compiled once for all workers of a run, whose directories lie beside each
    other."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cute-hopper-fp8"
    path = folder / "program.so"
    with FileLock(f"{folder}.lock"):
        if not path.exists():
            compiled(folder).rename(path)
    loaded = ctypes.CDLL(str(path))
    loaded.sum_of_small.restype = ctypes.c_float
    return loaded


# Every mask, descaling and output; lengths that blocks divide and others.
SHAPES = (
    "sq=1,skv=1",
    "b=2,sq=70,skv=0",
    "sq=130,skv=300,descale=head",
    "sq=130,skv=70,mask=causal,descale=tensor,out=float16",
    "sq=129,skv=33,mask=causal.tl",
    "hq=2,hkv=1,sq=67,skv=150,descale=head,out=float16",
    "sq=260,skv=3,mask=causal",
    "sq=65,skv=97,scale=-0.3,descale=head",
    "sq=65,skv=97,scale=0.0",
    "sq=140,skv=290,mask=window.70.3",
    "sq=140,skv=290,mask=causal+window.20.inf.tl,out=float16",
    "b=2,sq=140,skv=210,mask=lengths.140_130.0_200,descale=head",
    "sq=200,skv=200,mask=documents.5_135_60",
    "sq=70,skv=290,mask=prefix.133",
    "sq=140,skv=257,mask=causal,dist=increasing",
    "b=2,hq=2,hkv=1,sq=66,skv=65,lq=bshd.p16,lk=sbhd.o16,lv=bhsd.p32.xb,lo=bshd.p8.o8",
)
DEEP = ("sq=130,skv=400,mask=causal,descale=head", "sq=66,skv=290,mask=window.160.9")
# In the last block of keys, in the first, and in a block between.
UNSEEN = (
    "sq=70,skv=250,mask=causal.tl",
    "sq=70,skv=390,mask=window.20.3",
    "b=2,sq=40,skv=250,mask=lengths.30_40.67_200",
)
# Heads, batches and factors that differ, keys that a mask hides.
FAULTY = "b=2,hq=4,hkv=2,sq=70,skv=200,mask=causal,descale=head"
# What shows the others.
SHOWS = {
    "a value beyond the last key": "b=2,sq=40,skv=250,mask=lengths.30_40.67_200",
    "scores of the other sign": "sq=65,skv=97,scale=-0.3,descale=head",
}


def numerics_of(program: Program) -> Ruling:
    """The oracle of declared numerics on a build."""
    variant = program.variant
    support = replace(variant.support, head_dims=(program.head_dim,))
    declaration = replace(
        declared(variant.contract, variant.numerics, dtypes=support.dtypes),
        support=support,
        configs=(program.config,),
    )

    def run(problem: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ran = program.run(problem, Inputs(given["q"], given["k"], given["v"]))
        return {"out": ran.out, "lse": ran.lse}

    (problem,) = declared_numerics.asks(declaration, kernel.DTYPE)
    return declared_numerics.judge(trial(run, problem, declaration, "sm_90"))


def plant(library: ctypes.CDLL, fault: str) -> None:
    library.plant([*FAULTS].index(fault))


@has_headers
@has_host
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def whole(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(kernel, "encode", encode)
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)
        yield
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["small", "large"])
    def test_it_stays_inside_its_bounds(self, library: ctypes.CDLL, name: str, shape: str) -> None:
        assert max(program_of(name, library).verdict(shape)) <= 1

    @pytest.mark.parametrize("shape", DEEP)
    @pytest.mark.parametrize("name", ["deep", "chained"])
    def test_other_builds_stay_inside_their_bounds(
        self, library: ctypes.CDLL, name: str, shape: str
    ) -> None:
        assert max(program_of(name, library).verdict(shape)) <= 1

    @pytest.mark.parametrize("shape", UNSEEN)
    def test_nan_that_no_row_sees_stays_out(self, library: ctypes.CDLL, shape: str) -> None:
        for name in ("small", "large"):
            assert max(program_of(name, library).verdict(shape, spoiled=True)) <= 1

    @pytest.mark.parametrize("name", ["small", "large", "deep"])
    def test_no_matrix_meets_a_bank_conflict(self, library: ctypes.CDLL, name: str) -> None:
        program = program_of(name, library)
        problem = program.problem("sq=64,skv=300")
        assert program.run(problem, tensors(problem)).conflicts == (0, 0)

    @pytest.mark.parametrize(
        ("name", "word"),
        [
            ("small", "13 fraction bits, promoted every 64"),
            ("large", "13 fraction bits, promoted every 128"),
            ("chained", "13 fraction bits, never promoted"),
        ],
    )
    def test_it_adds_up_as_declared(self, library: ctypes.CDLL, name: str, word: str) -> None:
        ruling = numerics_of(program_of(name, library))
        assert acquitted(ruling)
        assert ruling.observed["accumulator of P V"] == word
        assert ruling.observed["P"] == kernel.DTYPE

    @pytest.mark.parametrize(
        ("fault", "word"),
        [
            ("every other block added by wgmma", "13 fraction bits, promoted every 128"),
            ("a block is never promoted", "13 fraction bits, never promoted"),
        ],
    )
    def test_an_interval_that_is_longer_than_declared_is_named(
        self, library: ctypes.CDLL, fault: str, word: str
    ) -> None:
        plant(library, fault)
        program = program_of("small", library)
        convicted(numerics_of(program), "float32, promoted every 64", f"behaves like {word}")
        # The element bound, which allows every rounding of P, does not see it.
        assert max(program.verdict(FAULTY)) <= 1

    def test_promotion_keeps_what_long_sums_of_one_sign_lose(self, library: ctypes.CDLL) -> None:
        """With equal scores P is exact, and only sums round; docs/cute.md has the table."""
        errors = {}
        for name in ("small", "chained"):
            program = program_of(name, library)
            problem = program.problem("sq=1,skv=4096,out=float16")
            v = torch.randn(problem.shape_v, generator=torch.manual_seed(0)).abs().to(E4M3)
            zero = torch.zeros(problem.shape_k).to(E4M3)
            out = program.run(problem, Inputs(zero[:, :, :1], zero, v)).out[0, 0, 0].double()
            mean = v.double().mean(2)[0, 0]
            errors[name] = float(((out - mean) / mean).abs().mean())
        assert errors["small"] < 2**-12  # half a place of fp16
        assert errors["chained"] > 0.03

    @pytest.mark.parametrize("fault", [*FAULTS][2:])
    def test_a_planted_fault_leaves_the_bounds(self, library: ctypes.CDLL, fault: str) -> None:
        plant(library, fault)
        program = program_of("small", library)
        spoiled = fault == "a value beyond the last key"
        assert max(program.verdict(SHOWS.get(fault, FAULTY), spoiled=spoiled)) > 1

    @pytest.mark.parametrize("role", ROLES)
    def test_whoever_is_slow_it_stays_inside_its_bounds(
        self, library: ctypes.CDLL, role: str
    ) -> None:
        library.slow(ROLES[role])
        assert max(program_of("small", library).verdict("sq=128,skv=450")) <= 1

    def test_every_wait_is_needed(self, library: ctypes.CDLL) -> None:
        program = program_of("small", library)
        lines = [
            number
            for number, line in enumerate(SOURCE.read_text().splitlines(), 1)
            if " wait_barrier(" in line
        ]
        assert len(lines) == 7
        for line in lines:
            library.weaken(line, -1, False)
            shows = []
            for slow in (0, *ROLES.values()):
                library.slow(slow)
                shows.append(max(program.verdict("sq=65,skv=330")) > 1)
                if shows[-1]:
                    break
            assert any(shows), f"without line {line}"
        library.slow(0)
        library.weaken(0, -1, True)
        assert max(program.verdict("sq=65,skv=330")) > 1, "with products still in flight"

    @pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
    def test_the_emulated_products_are_those_of_the_model(
        self, library: ctypes.CDLL, dtype: torch.dtype
    ) -> None:
        """Bit for bit `fused_dot` of the unit that bounds declare, subnormals, zeros and
        accumulators of any size among the operands."""
        torch.manual_seed(3)
        bits = torch.randint(0, 256, (2, 4000, 32), dtype=torch.uint8)
        a, b = (each.view(dtype) for each in bits)
        a, b = (
            torch.where(each.float().isfinite(), each.float(), 0.0).to(dtype) for each in (a, b)
        )
        a[:100] = 0.0
        a[100:200, 1:] = 0.0
        powers = torch.randint(-30, 30, (4000,)).float()
        c = torch.randn(4000) * torch.exp2(powers)
        c[::7] = 0.0
        word = str(dtype).removeprefix("torch.")
        unit = unit_for("sm_90", word, instruction="wgmma")
        wanted = fused_dot(a, b, c, unit)
        number = {E4M3: 2}.get(dtype, 3)
        rows = zip(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy(), c, strict=True)
        got = [
            library.sum_of_small(number, x.tobytes(), y.tobytes(), ctypes.c_float(float(z)))
            for x, y, z in rows
        ]
        assert torch.equal(torch.tensor(got), wanted)
        assert (wanted != 0).sum() > 3000
