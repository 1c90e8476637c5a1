"""The CuTe forward of 8-bit inputs for Hopper: its source on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cute import hopper_forward
from kernels.cute import hopper_fp8_forward as kernel
from tests.harness.cute_hopper_fp8_host import (
    FAULTS,
    ROLES,
    SOURCE,
    compiled,
    program_of,
)
from tests.harness.cute_hopper_host import Program, encode, waits
from tests.harness.cute_host import has_headers, has_host, library_of_all
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import declared, trial
from verify.arithmetic.dot import fused_dot
from verify.arithmetic.mma import unit_for
from verify.judging.findings import Ruling
from verify.oracles.numerics import oracle as declared_numerics
from verify.problem import Problem
from verify.problem.inputs import Inputs, tensors

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = library_of_all(tmp_path_factory, "cute-hopper-fp8", compiled)
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
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def whole(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(hopper_forward, "encode", encode)
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)
        yield
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["small", "large", "overlap"])
    def test_it_stays_inside_its_bounds(self, library: ctypes.CDLL, name: str, shape: str) -> None:
        assert max(program_of(name, library).verdict(shape)) <= 1

    @pytest.mark.parametrize("shape", DEEP)
    @pytest.mark.parametrize("name", ["deep", "chained", "chained_overlap"])
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
        lines = waits(SOURCE)
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
