"""The CuTe backward without a GPU: its declarations, its builds, and its own sources run on the CPU
as test_cute_kernel.py runs the forward's: each barrier and wait is dropped, and faults are
planted."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cuda import family
from kernels.cute import flash_backward as kernel
from kernels.cute import flash_forward
from tests.harness.cute_backward_host import FAULTS, ORDERS, SOURCE, Chosen, Program, compiled
from tests.harness.cute_host import has_headers, has_host, library_of_all
from tests.planted import copies
from verify.cuda.compile import CompileError, compilable
from verify.cuda.edits import edited, texts_of
from verify.problem import Problem
from verify.problem.inputs import dout as upstream
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config, Gradients, Saved, Unsupported, compiled_archs

SMALL, LARGE = kernel.CONFIGS
CHOICES = {
    "separate": Chosen(kernel.VARIANT, LARGE, "float16", 64),
    "atomic": Chosen(kernel.ATOMIC, SMALL, "bfloat16", 96),
}

# Declarations.


@pytest.mark.parametrize("variant", kernel.VARIANTS, ids=lambda variant: variant.name)
@has_headers
def test_every_part_of_a_choice_is_built_for_hopper_and_one_build_of_a_walk_elsewhere(
    variant,
) -> None:
    walks = (kernel.KEYS_ATOMIC,) if variant is kernel.ATOMIC else (kernel.KEYS, kernel.ROWS)
    names = {arch: [build.name for build in variant.builds(arch)] for arch in compiled_archs()}
    for arch, chosen in names.items():
        assert set(chosen) <= set(names["sm_90a"])
        for walk in walks:
            own = [name for name in chosen if name.startswith(f"{walk}, ")]
            assert len(own) == (2 if arch == "sm_90a" else 1)
            parts = [*(c.name for c in variant.configs), "bfloat16", "float16"]
            parts += ["d 96", "d 128"]
            if arch == "sm_90a":
                assert all(any(part in name.split(", ") for name in own) for part in parts)


def test_every_budget_is_of_a_build() -> None:
    names = {
        f"{walk}, {config.name}, {dtype}, d {dim}"
        for walk, chosen in kernel._BUILDS.items()
        for config, dtype, dim in chosen
    }
    assert set(kernel.SPILL_BUDGETS) <= names


@pytest.mark.parametrize(
    ("walk", "config"),
    [(kernel.KEYS, SMALL), (kernel.KEYS, LARGE), (kernel.ROWS, LARGE), (kernel.KEYS_ATOMIC, SMALL)],
)
@has_headers
def test_shared_memory_fits_every_architecture(walk: str, config: Config) -> None:
    assert kernel.walk_launch(walk, config, "float16", 128).shared_bytes <= 99 * 1024


def test_without_headers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_forward, "headers", lambda: None)
    with pytest.raises(CompileError, match="CUTLASS_PATH"):
        kernel.walk_launch(kernel.KEYS, SMALL, "float16", 64)


@pytest.mark.parametrize(
    ("text", "config", "argument"),
    [
        ("dtype=float32,d=64", SMALL, "dtype"),
        ("dtype=float16,d=80", SMALL, "head_dim"),
        ("dtype=float16,d=256", SMALL, "head_dim"),
        ("dtype=float16,d=64,ldo=bshd.p4", SMALL, "layout_dout"),
        ("dtype=float16,d=64", Config(block_m=48, block_n=64), "config"),
    ],
)
def test_what_it_does_not_support_it_refuses(text: str, config: Config, argument: str) -> None:
    problem = Problem.parse(f"sq=4,skv=4,{text}")
    given = tensors(problem)
    args = AttentionArgs(
        given.q, given.k, given.v, problem.mask, problem.scale, problem.score_mod, config
    )
    layout = problem.layout_dout
    dout = torch.empty(layout.extent(problem.shape_q), dtype=given.q.dtype)
    dout = dout.as_strided(problem.shape_q, layout.strides(problem.shape_q))
    assert dout.shape == upstream(problem).shape
    saved = Saved(torch.empty_like(given.q), torch.empty(problem.shape_q[:3]))
    gradients = Gradients(*map(torch.empty_like, (given.q, given.k, given.v)))
    for variant in kernel.VARIANTS:
        assert variant.backward is not None
        with pytest.raises(Unsupported) as error:
            variant.backward(args, saved, dout, gradients, {})
        assert error.value.argument == argument


def test_what_saves_the_log_sum_exp_takes_storages_that_the_backward_does_not() -> None:
    problem = Problem.parse("sq=4,skv=4,dtype=float16,d=64,lk=transposed.p64")
    assert kernel.split_q.VARIANT.support.refusal(problem) is None
    for variant in kernel.VARIANTS:
        refusal = variant.support.refusal(problem)
        assert refusal is not None
        assert refusal[0] == "layout_k"


@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_the_sums_of_rows_do_not_spill() -> None:
    builds = [b for b in kernel.VARIANT.builds("sm_80") if b.name.startswith("row_sums")]
    for build in builds:
        assert not list(build.broken(build.compile().resources, None))
    assert len(builds) == len(kernel.ELEMENTS)


@has_headers
@pytest.mark.parametrize("slip", copies.CUTE_BACKWARD_SLIPS)
def test_each_slip_of_a_known_bad_copy_fits_every_walk(
    slip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    for walk in (kernel.KEYS, kernel.ROWS, kernel.KEYS_ATOMIC):
        shipped = kernel.walk_launch(walk, SMALL, "float16", 64).source
        source = edited(shipped, [copies.CUTE_BACKWARD_SLIPS[slip]])
        assert texts_of(source) != texts_of(shipped)


# The sources on the CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(
        tmp_path_factory, "cute-backward", lambda folder: compiled(folder, CHOICES)
    )


@pytest.fixture(params=CHOICES)
def program(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[Program]:
    library.weaken(0, False)
    library.plant(-1)
    yield Program(library, request.param, CHOICES[request.param])
    library.weaken(0, False)
    library.plant(-1)


ONE_ORDER = ORDERS[:1]
SHAPES = (
    "sq=1,skv=1",
    "sq=64,skv=64",
    "sq=130,skv=70,mask=causal",
    "sq=70,skv=131,mask=causal",
    "sq=129,skv=33,mask=causal.tl",
    "hq=4,hkv=2,sq=67,skv=40,mask=causal",
    "sq=5,skv=0",
    "sq=0,skv=5",
    "sq=70,skv=3,mask=causal",
    "sq=65,skv=97,scale=-0.3",
    "sq=9,skv=40,scale=0.0",
    "sq=100,skv=140,mask=window.20.9",
    "sq=70,skv=60,mask=window.20.inf.tl",
    "b=2,sq=80,skv=130,mask=lengths.70_0.100_33",
    "sq=90,skv=70,mask=causal+documents.50_40",
    "b=2,hq=2,hkv=1,sq=66,skv=65,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8,ldo=bshd.p8",
)


@has_headers
@has_host
class TestOnTheHost:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_stays_inside_its_bounds(self, program: Program, shape: str) -> None:
        assert max(program.verdict(shape)) <= 1

    def test_shared_memory_has_no_bank_conflicts(self, program: Program) -> None:
        problem = program.problem("sq=130,skv=130")
        assert program.run(problem, program.saved(problem)).conflicts == (0, 0)

    def test_rows_without_a_key_and_keys_without_a_row_have_gradients_of_zero(
        self, program: Program
    ) -> None:
        problem = program.problem("b=2,sq=70,skv=90,mask=lengths.40_0.30_50")
        ran = program.run(problem, program.saved(problem)).gradients
        assert (ran["dq"][0, :, 40:] == 0).all()
        assert (ran["dk"][0, :, 30:] == 0).all()
        assert (ran["dv"][0, :, 30:] == 0).all()
        assert all((gradient[1] == 0).all() for gradient in ran.values())
        assert all((gradient[0] != 0).any() for gradient in ran.values())

    def test_the_order_of_warps_and_copies_changes_no_bit(self, program: Program) -> None:
        problem = program.problem("hq=2,hkv=1,sq=70,skv=130,mask=causal")
        saved = program.saved(problem)
        runs = [program.run(problem, saved, **order).gradients for order in ORDERS]
        # Adds of one block never race here, and blocks run in one order.
        for run in runs[1:]:
            assert all(torch.equal(run[name], runs[0][name]) for name in run)

    def test_the_entry_point_launches_these_kernels(
        self, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = program.problem("b=2,hq=4,hkv=2,sq=70,skv=90,mask=causal")
        given = tensors(problem)
        args = AttentionArgs(
            given.q, given.k, given.v, problem.mask, problem.scale, None, program.chosen.config
        )
        saved, variant = program.saved(problem), program.chosen.variant
        asked: list[str] = []

        def launch(entry: str, grid: object, block: object, shared: int, given: object) -> None:
            asked.append(entry)
            assert not program.launch(entry, (grid, block, shared), given)

        monkeypatch.setattr(family, "shared_room", lambda device: 99 * 1024)
        monkeypatch.setattr(kernel, "device_arch", lambda device: "sm_90a")
        monkeypatch.setattr(kernel, "loaded", lambda source, arch: source.entry)
        monkeypatch.setattr(kernel, "launch_kernel", launch)
        assert variant.backward is not None
        assert variant.backward_workspace is not None
        gradients = Gradients(*(torch.full_like(x, torch.nan) for x in (args.q, args.k, args.v)))
        workspace = {
            name: torch.full(shape, torch.nan)
            for name, (shape, _) in variant.backward_workspace(args).items()
        }
        variant.backward(args, saved, upstream(problem), gradients, workspace)
        assert asked == [made.source.entry for made in program.chosen.launches]
        expected = program.run(problem, saved).gradients
        assert all(torch.equal(x, expected[name]) for name, x in gradients.by_name().items())
        monkeypatch.setattr(family, "shared_room", lambda device: 48 * 1024)
        with pytest.raises(Unsupported, match="bytes of shared memory") as error:
            variant.backward(args, saved, upstream(problem), gradients, workspace)
        assert error.value.argument == "config"

    def test_planted_faults_are_caught(self, program: Program) -> None:
        shape = "hq=2,hkv=1,sq=130,skv=100,mask=causal"
        for n, fault in enumerate(FAULTS):
            if program.chosen.variant is kernel.VARIANT and "atomic" in fault:
                continue
            program.library.plant(n)
            assert max(program.verdict(shape, ONE_ORDER)) > 1, fault
        program.library.plant(-1)
        assert max(program.verdict(shape, ONE_ORDER)) <= 1

    def test_every_barrier_and_every_wait_is_needed(self, program: Program) -> None:
        lines = [
            n
            for n, line in enumerate(SOURCE.read_text().splitlines(), 1)
            if "__syncthreads();" in line
            and (program.chosen.variant is kernel.ATOMIC or "dS has come" not in line)
        ]
        for line, hasty in [*((line, False) for line in lines), (0, True)]:
            program.library.weaken(line, hasty)
            # Without steps, copies into the owned tiles can be on their way at the end.
            shapes = ("sq=130,skv=130", "sq=0,skv=130", "sq=130,skv=0")
            noticed = any(ratio > 1 for shape in shapes for ratio in program.verdict(shape))
            assert noticed, (
                f"without line {line}" if line else "with waits that leave one group in flight"
            )
