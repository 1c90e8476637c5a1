"""Maxima that are only upper bounds of a row's own, shared by a tile or rounded up: honest kernels
pass, and what they declare is held against them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from references.masks import Causal, Full, Lengths
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from tests.meta.tolerance.test_tolerance import ALL, SHAPES, ratios, suits, truth_of
from tests.meta.tolerance.test_tolerance_bound import blocks_of, bound_of, with_operands
from verify.oracles import gather
from verify.oracles.long import long_offsets, long_whole
from verify.oracles.numerics.oracle import asks
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics.forward import underived
from verify.tolerance.forward import bound, resolve
from verify.tolerance.maxima import shared_excess, whole_tiles
from verify.variant import Config, Numerics

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3 = ("float8_e4m3fn",)
HONEST = (
    Kernel("a tile of 8 rows", flat_numerics(maximum_rows=8, block_n=32)),
    Kernel(
        "all rows, fused",
        flat_numerics(maximum_rows=0, block_n=32, scale_roundings=3),
        style="fused",
    ),
    Kernel("rounded up to an integer", flat_numerics(maximum_excess=1.0, block_n=32)),
    Kernel("rounded up to bfloat16", flat_numerics(maximum_step=2.0**-7, block_n=16), dtypes=ALL),
    Kernel(
        "a tile, normalised",
        flat_numerics(maximum_rows=4, operands="float32", normalised=True, exp="vexp", block_n=0),
        arch="cpu",
        style="eager",
        dtypes=ALL,
    ),
    Kernel(
        "sum by mma", flat_numerics(row_sum_of="mma", maximum_excess=3.0, block_n=32), style="fused"
    ),
    Kernel(
        "ex2.approx.f16",
        flat_numerics(
            exp="ex2.approx.f16", rescale_exp="ex2.approx", maximum_excess=2.0, block_n=32
        ),
        dtypes=("float16",),
    ),
    Kernel("__expf, a tile", flat_numerics(exp="__expf", maximum_rows=16, block_n=32)),
    Kernel(
        "8 bits",
        flat_numerics(probability_scale=256.0, promotion=32, maximum_excess=1.0, block_n=32),
        dtypes=E4M3,
    ),
    Kernel(
        "a tile, rounded up, in fp32",
        flat_numerics(maximum_rows=8, maximum_step=0.01, maximum_excess=0.5, block_n=32),
        dtypes=("float32",),
    ),
    Kernel(
        "fp16 accumulators, a tile",
        flat_numerics(accumulator="float16", maximum_rows=8, block_n=32),
        dtypes=("float16",),
    ),
)


@pytest.mark.first_look(3)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel) -> None:
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    for turn, (dtype, distribution) in enumerate(itertools.product(kernel.dtypes, ordinary())):
        out = ",out=bfloat16" if dtype == E4M3[0] else ""
        text = f"{shapes[turn * 5 % len(shapes)]},dtype={dtype}{out},dist={distribution}"
        problem = Problem.parse(text)
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        found = ratios(problem, emulate(problem, kernel, list(Luck)[turn % 2]), truth)
        assert found.worst <= 1, f"{kernel.name}: r = {found.worst:.3g} for {problem.name}"


OWN = Kernel("own", flat_numerics(block_n=32))
FAULTS = {
    "shared in secret": (OWN.but(maximum_rows=0), OWN, "sq=40,skv=96,d=64,dtype=float16,scale=1.0"),
    "further than declared": (
        OWN.but(maximum_excess=24.0),
        OWN.but(maximum_excess=1.0),
        "sq=16,skv=96,d=64,dtype=float16",
    ),
    "a larger tile than declared": (
        OWN.but(maximum_rows=0),
        OWN.but(maximum_rows=2),
        "sq=40,skv=96,d=64,dtype=float16,scale=1.0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str) -> None:
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    truth = truth_of(problem, declared.numerics, declared.arch)
    assert ratios(problem, emulate(problem, declared, Luck.AGAINST), truth).worst <= 1
    assert ratios(problem, emulate(problem, faulty), truth).worst > 1


# What the bound must be


def test_how_far_a_shared_maximum_lies_above_a_row() -> None:
    """By the largest score of the tile; by 0 at least where rows of zeros fill it up."""
    problem = Problem(seqlen_q=5, seqlen_kv=1, head_dim=1, dtype="float32", softmax_scale=1.0)
    q = torch.tensor([1.0, 4.0, -2.0, -3.0, -7.0], dtype=torch.float64).view(1, 1, 5, 1)
    k = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    arithmetic = resolve(flat_numerics(maximum_rows=2), Config(), problem, "sm_90")
    found = shared_excess(problem, q, k, arithmetic)
    want = torch.tensor([[3.0, 0.0, 0.0, 1.0, 7.0]], dtype=torch.float64)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    some = shared_excess(problem, q, k, arithmetic, torch.tensor([3, 0]))
    torch.testing.assert_close(some, want[:, [3, 0]], atol=1e-5, rtol=0)
    assert shared_excess(problem, q, k, resolve(Numerics(), Config(), problem, "sm_90")) is None
    with pytest.raises(ValueError, match="rows share a maximum"):
        bound(blocks_of(problem, q, k, k), arithmetic, problem)


def test_a_row_that_overflows_takes_its_tile_along() -> None:
    problem = Problem(seqlen_q=3, seqlen_kv=1, head_dim=1, dtype="bfloat16", softmax_scale=1.0)
    q = torch.tensor([1.0, 3e38, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    k = torch.full((1, 1, 1, 1), 8.0, dtype=torch.float64)
    arithmetic = resolve(flat_numerics(maximum_rows=2), Config(), problem, "sm_90")
    above = shared_excess(problem, q, k, arithmetic)
    found = bound(blocks_of(problem, q, k, k), arithmetic, problem, above)
    assert found.out[0, :, 0].isinf().tolist() == [True, True, False]
    assert found.lse[0].isinf().tolist() == [True, True, False]


def test_what_tiles_are_touched() -> None:
    touched = torch.tensor([[[False, True, False, False, False, False, True]]])
    assert whole_tiles(touched, 3)[0, 0].tolist() == [True] * 3 + [False] * 3 + [True]
    assert whole_tiles(touched, 1) is touched


def test_tiles_come_from_the_config_where_nothing_is_declared() -> None:
    problem = Problem(seqlen_q=50, seqlen_kv=9, head_dim=16, dtype="float16")
    found = [
        resolve(flat_numerics(maximum_rows=rows), Config(block_m=32), problem, "sm_90").maximum_rows
        for rows in (None, 0, 1, 8)
    ]
    assert found == [32, 50, 1, 8]


def test_small_p_lose_more_the_further_the_maximum_leads() -> None:
    """Half of fp16's smallest number, times e^lead."""
    bounds = [
        float(with_operands([0.0], [0.0] * 2, [1.0, 1.0], dtype="float16", maximum_excess=n).out[0])
        for n in (0.0, 8.0, 16.0)
    ]
    for n, found in zip((8, 16), bounds[1:], strict=True):
        assert found - bounds[0] == pytest.approx(2.0**-25 * 2.0**n, rel=0.05)


def test_nothing_is_asked_where_all_p_vanish() -> None:
    """e^-87 is the least normal number of fp32."""
    for excess, asked in ((100.0, True), (126.0, False)):
        found = with_operands([0.0], [0.0] * 2, [1.0, 1.0], dtype="float32", maximum_excess=excess)
        assert bool(found.out.isfinite().all()) is asked
        assert bool(found.lse.isfinite().all()) is asked


def test_the_words_show_in_the_bounds() -> None:
    text = "sq=20,skv=128,d=64,scale=0.02,dist=same_sign_v,dtype=float16"
    for changes in ({"maximum_excess": 6.0}, {"maximum_step": 0.5}):
        one, own = bound_of(text, flat_numerics(**changes)), bound_of(text)
        assert bool((one.out >= own.out).all())
        assert bool((one.lse >= own.lse).all())
        assert bool((one.out > own.out).any())
    problem = Problem.parse("sq=20,skv=128,d=64,scale=1.0,dtype=float16")
    shared, own = (truth_of(problem, flat_numerics(maximum_rows=n), "sm_90") for n in (0, 1))
    assert float((shared.out_bound / own.out_bound).max()) > 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maximum_rows": -1}, r"numerics\.softmax\.maximum\.rows: -1"),
        ({"maximum_excess": -1.0}, r"numerics\.softmax\.maximum\.excess: -1\.0"),
        ({"maximum_excess": math.inf}, r"numerics\.softmax\.maximum\.excess: inf"),
        ({"maximum_step": 1.5}, r"numerics\.softmax\.maximum\.step: 1\.5"),
        (
            {"maximum_rows": 2, "split_keys": True},
            r"numerics\.softmax\.maximum\.rows: .*split_keys",
        ),
        (
            {"maximum_step": 0.1, "normaliser": "lse"},
            r"numerics\.softmax\.maximum\.step: .*normaliser",
        ),
        (
            {"maximum_excess": 1.0, "maximum_lag": 8.0},
            r"numerics\.softmax\.maximum\.excess: .*maximum\.lag",
        ),
    ],
    ids=str,
)
def test_what_is_illegal_or_not_derived_is_refused(
    changes: dict[str, object], message: str
) -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    with pytest.raises(ValueError, match=message):
        resolve(flat_numerics(**changes), Config(), problem, "sm_90")


# On trial


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    with bench("leading_maximum.py", tmp_path_factory.mktemp("maximum")) as found:
        yield found


HALF = SQUARE.but(dtype="float16")
LARGE = HALF.but(softmax_scale=2.0, seqlen_q=40, seqlen_kv=40)


@pytest.mark.parametrize("name", ["shared", "whole", "coarse"])
def test_a_right_kernel_passes(name: str, opened: Bench) -> None:
    for oracle in ("bound", "repeat", "execution", "memory"):
        verdict = opened.verdict(name, "accuracy", oracle, LARGE)
        assert verdict.outcome == "pass", verdict.finding
    for group, problem in (
        ("poison", LARGE.but(mask=Causal())),
        ("causality", LARGE),
        ("decode_step", LARGE.but(mask=Full())),
        ("key_shift", HALF.but(distribution="small_integers", mask=Full())),
        ("power_of_two", HALF.but(distribution="octaves")),
        ("counting", HALF.but(distribution="counting")),
        ("declared_numerics", asks(opened.variants[name], HALF.dtype)[0]),
    ):
        verdict = opened.verdict(name, group, group, problem)
        assert verdict.outcome == "pass", verdict.finding
    if name == "shared":
        problem = HALF.but(distribution="gather", mask=Lengths((24, 3), (9, 7)))
        assert opened.verdict(name, "gather", "gather", problem).outcome == "pass"


@pytest.mark.parametrize("name", ["shares-in-secret", "leads-further"])
def test_a_wrong_one_is_convicted(name: str, opened: Bench) -> None:
    verdict = opened.verdict(name, "accuracy", "bound", LARGE)
    assert verdict.outcome == "fail"


def test_oracles_whose_premise_is_broken_say_so(opened: Bench) -> None:
    for oracle in (gather.FORWARD, long_offsets.ORACLE, *long_whole.ORACLES):
        assert oracle.excludes is not None
        assert oracle.excludes(opened.variants["whole"]) is not None
    found = {name: gather.excludes(declaration) for name, declaration in opened.variants.items()}
    assert found["shared"] is None
    assert "winner's P is not 1" in str(found["whole"])
    assert "winner's P is not 1" in str(found["coarse"])
    for changes in ({"maximum_rows": 2}, {"maximum_excess": 1.0}, {"maximum_step": 0.1}):
        arithmetic = resolve(flat_numerics(**changes), Config(), HALF, "cpu")
        assert "maximum" in str(underived(arithmetic))
