"""Factors of blocks of rows (`ByBlock`): honest kernels stay within the bound, the scale of the
neighbouring block does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from references.quantisation import KINDS, ByBlock, ByBlockOf64, ByHead, Quantisation
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.meta.tolerance.test_tolerance import ratios, truth_of
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import stored_factors
from verify.tolerance.forward import resolve
from verify.variant import Config

DTYPES = ("float8_e4m3fn", "float8_e5m2")
OURS = flat_numerics(
    scale_roundings=3, probability_scale=256.0, output_roundings=1, block_n=32, promotion=32
)
PROMOTED = Kernel("promoted, sm_90", OURS, dtypes=DTYPES)
WIDE = PROMOTED.but(name="everything in fp32", probability="float32", block_n=0, arch="cpu")
HONEST = (
    PROMOTED,
    PROMOTED.but(name="13 bits throughout, sm_89", promotion=0, arch="sm_89"),
    PROMOTED.but(name="mma.sync, sm_90", promotion=0, instruction="mma.sync", eight="mma.sync"),
    PROMOTED.but(name="25 bits, sm_100", arch="sm_100"),
    PROMOTED.but(name="tiles of two blocks", block_n=128),
    PROMOTED.but(name="P in bf16", probability="bfloat16"),
    PROMOTED.but(name="normalised P", style="eager", normalised=True, block_n=0, exp="vexp"),
    WIDE,
)
SHAPES = (
    "sq=70,skv=130,d=32,descale=block64",
    "b=2,hq=4,hkv=2,sq=9,skv=140,d=16,mask=causal,descale=block64",
    "sq=8,skv=300,d=64,mask=window.100.0,descale=block128",
    "sq=16,skv=48,d=64,scale=-0.125,descale=block64",
    "sq=9,skv=150,d=24,dv=40,softcap=20.0,descale=block128",
    "hq=2,hkv=2,sq=20,skv=75,d=16,descale=rows8",
    "hq=4,hkv=2,sq=17,skv=33,d=32,scale=1.0,descale=rows8",
    "sq=2,skv=0,d=16,descale=block64",
    "sq=0,skv=2,d=16,descale=block64",
)

pytestmark = pytest.mark.usefixtures("one_thread", "rows8")


@pytest.fixture
def rows8() -> Iterator[type[Quantisation]]:
    """Another size for queries and keys, as a user writes it."""

    @dataclass(frozen=True)
    class Rows(ByBlock):
        word: ClassVar[str] = "rows8"
        queries: ClassVar[int] = 8
        keys: ClassVar[int] = 16

    try:
        yield Rows
    finally:
        KINDS.pop("rows8", None)


@pytest.mark.first_look(2)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel) -> None:
    """Every distribution, each with the next shape, dtype and luck in turn."""
    shapes, lucks = itertools.cycle(SHAPES), [*Luck]
    for turn, (distribution, dtype) in enumerate(itertools.product(ordinary(), kernel.dtypes)):
        problem = Problem.parse(f"{next(shapes)},dtype={dtype},dist={distribution},seed={turn}")
        luck = lucks[turn // 2 % 2]
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        found = ratios(problem, emulate(problem, kernel, luck), truth)
        said = f"{kernel.name}, {luck.value}: r = {found.worst:.3g} for {problem.name}"
        assert found.worst <= 1, said


def test_honest_kernels_use_much_of_the_bound() -> None:
    """The factors of blocks make it no looser: what P in 8 bits loses decides."""
    worst = 0.0
    for seed, luck in itertools.product(range(4), Luck):
        text = f"sq=33,skv=140,d=32,descale=block64,dist=one_hot_v,seed={seed}"
        problem = Problem.parse(f"{text},dtype=float8_e4m3fn")
        found = ratios(problem, emulate(problem, PROMOTED, luck), truth_of(problem, OURS, "sm_90"))
        worst = max(worst, float(found.out.max()))
    assert 0.3 <= worst <= 1


@pytest.mark.parametrize("kernel", [PROMOTED, WIDE], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", "QKV")
def test_the_scale_of_the_next_block_exceeds_the_bound(name: str, kernel: Kernel) -> None:
    text = "sq=130,skv=130,d=32,scale=1.0,descale=block64,seed=2,dtype=float8_e4m3fn"
    problem = Problem.parse(text)
    truth = truth_of(problem, kernel.numerics, kernel.arch)
    assert ratios(problem, emulate(problem, kernel, Luck.AGAINST), truth).worst <= 1
    faulty = kernel.but(fault=f"descale of {name} of the next block")
    assert ratios(problem, emulate(problem, faulty), truth).worst > 1


def test_what_a_block_scale_resolves_to(rows8: type[Quantisation]) -> None:
    problem = Problem(seqlen_q=20, seqlen_kv=100, head_dim=64, dtype="float8_e4m3fn", seed=1)
    plain = resolve(OURS, Config(), problem.but(quantisation=ByHead()), "sm_90")
    assert (plain.parts, plain.between_blocks) == (0, 2 * plain.blocks)
    blocks = resolve(OURS, Config(), problem.but(quantisation=ByBlockOf64()), "sm_90")
    assert (blocks.parts, blocks.between_blocks) == (2, 2 * blocks.blocks + 6)
    small = problem.but(quantisation=rows8())
    factors = stored_factors(small)
    assert {name: tuple(x.shape) for name, x in factors.items()} == {
        "descale_q": (1, 1, 3),
        "descale_k": (1, 1, 7),
        "descale_v": (1, 1, 7),
    }
    found = resolve(OURS, Config(), small, "sm_90")
    assert found.parts == 7
    product = factors["descale_q"].min() * factors["descale_k"].min()
    assert found.least_factors == (float(product), float(factors["descale_v"].min()))
    assert found.largest_factor == max(1.0, float(factors["descale_v"].max()))
