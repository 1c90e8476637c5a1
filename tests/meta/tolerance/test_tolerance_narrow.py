"""The bounds of narrow and unusual arithmetic on trial: honest emulations of fp16 accumulators,
cheap exponentials, lagging maxima and other row sums stay inside, and what is worse than declared
does not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.harness.declared import flat_numerics
from tests.harness.emulation import Emulation, Kernel, Luck, emulate
from tests.meta.tolerance.test_tolerance import SHAPES, ratios, suits, truth_of
from tests.meta.tolerance.test_tolerance_bound import blocks_of, bound_of
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance.forward import bound, resolve
from verify.variant import Config

WIDE = {"score_accumulator": "float32"}
HALF, E4M3 = ("float16",), ("float8_e4m3fn",)
LAZY = {"exp": "exp2_poly3", "rescale_exp": "ex2.approx", "maximum_lag": 8.0}
HALVES = {"exp": "ex2.approx.f16", "rescale_exp": "ex2.approx", "probability": "float16"}
HONEST = (
    Kernel(
        "fp16 accumulators, sm_90", flat_numerics(accumulator="float16", block_n=32), dtypes=HALF
    ),
    Kernel(
        "fp16 accumulators, sm_80",
        flat_numerics(accumulator="float16", block_n=32),
        arch="sm_80",
        dtypes=HALF,
        style="fused",
    ),
    Kernel(
        "fp16 accumulators, CPU",
        flat_numerics(accumulator="float16", exp="exp_u20", block_n=64),
        arch="cpu",
        dtypes=HALF,
    ),
    Kernel(
        "fp16 for scores alone", flat_numerics(score_accumulator="float16", block_n=32), dtypes=HALF
    ),
    Kernel(
        "fp16 for P V, promoted",
        flat_numerics(accumulator="float16", score_accumulator="float32", promotion=64, block_n=64),
        dtypes=HALF,
    ),
    Kernel(
        "fp16, each block's P V added in fp32",
        flat_numerics(accumulator="float16", promotion="block", block_n=32, prescale="q"),
        dtypes=HALF,
    ),
    Kernel("FlashAttention-4", flat_numerics(**LAZY, block_n=32)),
    Kernel(
        "lagging maximum, fused",
        flat_numerics(maximum_lag=8.0, block_n=16, scale_roundings=3),
        style="fused",
    ),
    Kernel("__expf", flat_numerics(exp="__expf", block_n=32)),
    Kernel("ex2.approx.f16", flat_numerics(**HALVES, block_n=32), dtypes=HALF),
    Kernel(
        "ex2.approx.ftz.bf16",
        flat_numerics(exp="ex2.approx.ftz.bf16", block_n=32),
        dtypes=("bfloat16",),
    ),
    Kernel("sum of rounded P", flat_numerics(row_sum_of="rounded", block_n=32)),
    Kernel("sum by mma", flat_numerics(row_sum_of="mma", block_n=32), style="fused"),
    Kernel(
        "sum by mma in fp16",
        flat_numerics(row_sum_of="mma", accumulator="float16", block_n=32),
        dtypes=HALF,
    ),
    Kernel("lanes apart", flat_numerics(row_sum_lanes=4, row_sum_apart=True, block_n=32)),
    Kernel("lanes that go on", flat_numerics(row_sum_lanes=4, block_n=32), style="fused"),
    Kernel("IEEE division", flat_numerics(division="div.rn", probability="float32", block_n=32)),
    Kernel(
        "fp16 P of 8-bit inputs",
        flat_numerics(probability="float16", block_n=32, promotion=32),
        dtypes=E4M3,
    ),
    Kernel(
        "8 bits, sum by mma",
        flat_numerics(row_sum_of="mma", probability_scale=256.0, block_n=32),
        dtypes=E4M3,
        style="fused",
    ),
    Kernel(
        "8 bits, sum of rounded P", flat_numerics(row_sum_of="rounded", block_n=32), dtypes=E4M3
    ),
    Kernel(
        "8 bits into fp16",
        flat_numerics(accumulator="float16", block_n=32),
        arch="sm_89",
        dtypes=E4M3,
    ),
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(4)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel):
    """Every distribution, each with the next shape, dtype and luck in turn."""
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    for turn, (dtype, distribution) in enumerate(itertools.product(kernel.dtypes, ordinary())):
        eight = ",out=bfloat16" if dtype == E4M3[0] else ""
        problem = Problem.parse(
            f"{shapes[turn * 5 % len(shapes)]},dtype={dtype}{eight},dist={distribution}"
        )
        luck = list(Luck)[turn % 2]
        found = ratios(
            problem, emulate(problem, kernel, luck), truth_of(problem, kernel.numerics, kernel.arch)
        )
        assert found.worst <= 1, (
            f"{kernel.name}, {luck.value}: r = {found.worst:.3g} for {problem.name}"
        )


# Planted faults: (kernel as it computes, what it declares, problem)

PLAIN = Kernel("plain", flat_numerics(block_n=32))
SINGLE = Kernel("single", flat_numerics(block_n=16), dtypes=("float32",))
EIGHT = Kernel(
    "eight", flat_numerics(probability_scale=256.0, block_n=32, promotion=32), style="fused"
)
PROMOTED = HONEST[4]
BY_BLOCK = HONEST[5]
LONG = "sq=16,skv=96,d=64"
FAULTS: dict[str, tuple[Kernel, Kernel, str]] = {
    "P V in fp16": (
        PLAIN.but(accumulator="float16"),
        PLAIN,
        "sq=16,skv=256,d=64,dtype=float16,dist=v_mean",
    ),
    "scores in fp16": (
        PLAIN.but(score_accumulator="float16"),
        PLAIN,
        f"{LONG},dtype=float16,scale=1.0",
    ),
    "fp16, said to be promoted": (
        PROMOTED.but(promotion=0),
        PROMOTED,
        "sq=16,skv=2048,d=16,scale=0.01,dtype=float16,dist=v_mean",
    ),
    "a polynomial": (SINGLE.but(exp="exp2_poly3"), SINGLE, f"{LONG},dtype=float32"),
    "a polynomial rescales": (
        SINGLE.but(rescale_exp="exp2_poly3"),
        SINGLE,
        f"{LONG},dtype=float32",
    ),
    "ex2.approx.f16": (PLAIN.but(**HALVES), PLAIN, f"{LONG},dtype=float16"),
    "bf16 exponential under fp16": (
        PLAIN.but(exp="ex2.approx.ftz.bf16"),
        PLAIN.but(**HALVES),
        f"{LONG},dtype=float16",
    ),
    "a maximum that lags": (
        EIGHT.but(maximum_lag=8.0),
        EIGHT,
        f"{LONG},scale=0.5,dtype=float8_e4m3fn,out=bfloat16",
    ),
    "sum of rounded P": (PLAIN.but(row_sum_of="rounded"), PLAIN, f"{LONG},dtype=bfloat16"),
    "sum by a 13-bit mma": (
        EIGHT.but(row_sum_of="mma", promotion=0),
        EIGHT.but(promotion=0),
        "sq=16,skv=1024,d=16,scale=0.01,dtype=float8_e4m3fn,out=bfloat16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str):
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    truth = truth_of(problem, declared.numerics, declared.arch)
    # The same problem computed as declared passes: it is the fault that is caught.
    assert ratios(problem, emulate(problem, declared, Luck.AGAINST), truth).worst <= 1
    functions = [
        (kernel.numerics.softmax.exp, kernel.numerics.softmax.rescale_exp)
        for kernel in (faulty, declared)
    ]
    # where the function's error is the fault
    luck = Luck.NEAREST if functions[0] == functions[1] else Luck.AGAINST
    assert ratios(problem, emulate(problem, faulty, luck), truth).worst > 1


# What the bound must be


def test_a_chain_longer_than_declared_exceeds_the_bound():
    """A sum of 1 and thousands of 2^-25 does not move in one chain; in lanes, a block at a time, it
    does."""
    keys = 4096
    problem = Problem(seqlen_q=1, seqlen_kv=keys, head_dim=1, dtype="float16", softmax_scale=1.0)
    q, k, v = torch.tensor([[17.328125]]), torch.full((keys, 1), -1.0), torch.zeros(keys, 1)
    k[0], v[0] = 0.0, 1.0
    block = blocks_of(problem, *(x.double()[None, None] for x in (q, k, v)))
    kernel = Kernel("lanes", flat_numerics(row_sum_lanes=4, row_sum_apart=True, block_n=64))
    any_order = flat_numerics(block_n=64)
    bounds = [
        bound(block, resolve(n, Config(), problem, "sm_90"), problem).lse.item()
        for n in (kernel.numerics, any_order)
    ]
    errors = []
    for numerics, raw in ((kernel.numerics, False), (any_order, True)):
        emulation = Emulation(problem, replace(kernel, numerics=numerics), Luck.NEAREST, {})
        x = (q @ k.mT)[None] * (1.0 if raw else math.log2(math.e))
        _, lse = emulation.walk(x, v[None], raw=raw)
        errors.append(abs(lse.item() - block.lse.item()))
    assert errors[0] <= bounds[0] < errors[1] <= bounds[1]


@pytest.mark.parametrize(
    ("declared", "faulty"),
    [
        (BY_BLOCK, BY_BLOCK.but(block_n=1024)),
        (BY_BLOCK, BY_BLOCK.but(promotion=0)),
        (BY_BLOCK.but(promotion=32), BY_BLOCK),
        (BY_BLOCK.but(promotion=32), BY_BLOCK.but(promotion=1024)),
    ],
    ids=["P V later", "P V never", "Q K^T never", "Q K^T later"],
)
def test_sums_promoted_less_often_than_declared_exceed_the_bound(declared: Kernel, faulty: Kernel):
    """A chain in fp16 keeps the first term of 1 and 1023 of 2^-16: 16 of these are less than half
    of its last place.  LSE holds such a sum of 1024 columns, O one of 1024 keys."""
    sums = torch.full((1024, 1), 2.0**-16)
    sums[0] = 1.0
    of_scores = torch.full((1, 1024), 4.0), torch.zeros(2, 1024), torch.eye(2, 1024)
    of_scores[1][0] = 4.0 * sums[:, 0]
    of_values = torch.zeros(1, 1), torch.zeros(1024, 1), sums

    def worst(kernel: Kernel, operands: tuple[torch.Tensor, ...]) -> float:
        q, k, v = (x.half()[None, None] for x in operands)
        lengths = {"seqlen_q": 1, "seqlen_kv": k.shape[2], "head_dim": k.shape[3]}
        problem = Problem(**lengths, dtype="float16", softmax_scale=1.0)
        block = blocks_of(problem, q.double(), k.double(), v.double())
        limit = bound(block, resolve(declared.numerics, Config(), problem, "sm_90"), problem)
        factors = {"v": torch.ones(1, 1, 1)}
        got = Emulation(problem, kernel, Luck.NEAREST, factors).run(q, k, v)
        errors = (got.out[0] - block.out) / limit.out, (got.lse[0] - block.lse) / limit.lse
        return max(float(error.nan_to_num().abs().max()) for error in errors)

    assert max(worst(declared, operands) for operands in (of_scores, of_values)) <= 1
    assert max(worst(faulty, operands) for operands in (of_scores, of_values)) > 1


def test_lsees_of_long_rows_are_known_better_from_shorter_chains():
    text = "sq=4,skv=4096,d=64,dtype=bfloat16"
    chain, lanes, blocks = (
        bound_of(text, flat_numerics(**changes)).lse
        for changes in ({}, {"row_sum_lanes": 4}, {"row_sum_lanes": 4, "row_sum_apart": True})
    )
    assert bool((chain > 2 * lanes).all())
    assert bool((lanes > 1.5 * blocks).all())
