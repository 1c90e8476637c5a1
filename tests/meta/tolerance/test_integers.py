"""Q and K that a kernel rounds to 8-bit integers: honest kernels of every grouping stay within the
bound, wrong ones do not, and the bound has the parts that its derivation says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness.declared import flat_numerics
from tests.harness.emulated_integers import PATTERNS, Quantiser, emulate_given, emulate_integers
from tests.harness.emulation import Kernel, Luck
from tests.meta.tolerance.test_tolerance import Ratios, ratios, suits, truth_of
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics.forward import underived
from verify.tolerance.forward import resolve
from verify.tolerance.integers import Steps
from verify.variant import (
    Config,
)

OURS = flat_numerics(
    quantised_products="int8",
    query_tile=16,
    key_tile=16,
    floor=1e-7,
    scale_roundings=5,
    block_n=32,
)
PLAIN = Kernel("tiles of 16", OURS)
HONEST = (
    PLAIN,
    PLAIN.but(name="less the mean", centred="input", query_tile=32),
    PLAIN.but(
        name="one tile, no floor, the mean in fp32",
        query_tile=0,
        key_tile=0,
        floor=0.0,
        centred="float32",
        probability="float32",
    ),
    PLAIN.but(name="Q scaled before", query_tile=8, key_tile=8, floor=0.0, query_scaled=True),
    PLAIN.but(
        name="tiles of 4, P in fp32, CPU",
        arch="cpu",
        dtypes=("float16", "bfloat16", "float32"),
        query_tile=4,
        key_tile=4,
        query_scaled=True,
        centred="input",
        probability="float32",
    ),
)
EIGHT = PLAIN.but(
    name="P and V in e4m3, sm_90",
    probability="float8_e4m3fn",
    value_top=448.0,
    probability_top=447.88,
    promotion="block",
    centred="input",
)
HONEST += (
    EIGHT,
    EIGHT.but(
        name="columns to 2.25, fused, CPU",
        value_top=2.25,
        probability_top=448.0,
        row_sum_of="any",
        promotion=0,
        centred="none",
        style="fused",
        arch="cpu",
    ),
)
HOW = [
    Quantiser(pattern, quotient, ties, least)
    for pattern in PATTERNS
    for quotient in ("x / factor", "x * (127 / largest)")
    for ties in ("even", "away")
    for least in ("added", "at least")
]
SHAPES = (
    "sq=40,skv=70,d=32",
    "hq=4,hkv=2,sq=17,skv=33,d=64,mask=causal",
    "sq=9,skv=96,d=16,scale=1.0",
    "sq=5,skv=3,d=16",
    "sq=1,skv=130,d=64,scale=-0.5",
    "b=2,sq=20,skv=20,d=24,mask=window.5.2",
    "sq=16,skv=48,d=64,scale=4.0",
    "sq=3,skv=1,d=16",
    "sq=2,skv=0,d=16",
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(2)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel) -> None:
    """Every distribution, each with the next shape, grouping, quotient, dtype and luck in turn."""
    shapes = itertools.cycle(SHAPES)
    hows = itertools.cycle(HOW[HONEST.index(kernel) :: 7])
    for turn, (distribution, dtype) in enumerate(itertools.product(ordinary(), kernel.dtypes)):
        problem = Problem.parse(f"{next(shapes)},dtype={dtype},dist={distribution},seed={turn}")
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        how, emulated = next(hows), kernel
        if kernel.numerics.softmax.row_sum.of == "any":
            emulated = kernel.but(row_sum_of=("unrounded", "rounded", "mma")[turn % 3])
        if not suits(kernel, problem.name):
            continue
        result = emulate_integers(problem, emulated, how, [*Luck][turn % 2])
        found = ratios(problem, result, truth)
        assert found.worst <= 1, f"{kernel.name}, {how}: r = {found.worst:.3g} for {problem.name}"


def given(problem: Problem, seed: int, change: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
    """Normal Q, K and V of the problem, the first two changed in place."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    change(q, k)
    return [x.to(problem.format.torch) for x in (q, k, v)]


def _one_huge_row(q: Tensor, k: Tensor) -> None:
    q[:, :, 3] *= 1000
    k[:, :, 5] *= 1000


def _outlying_channel(q: Tensor, k: Tensor) -> None:
    k[..., 2] += 60
    q[..., 2] *= 8


def _constant(q: Tensor, k: Tensor) -> None:
    q.fill_(0.37)
    k.fill_(-1.83)


def _zeros_but_one_row(q: Tensor, k: Tensor) -> None:
    q[:, :, 1:] = 0
    k[:, :, 1:] = 0


def _between_integers(q: Tensor, k: Tensor) -> None:
    """Every quotient is half an odd integer, and a row's have one sign."""
    for x in (q, k):
        x.copy_((x * 40).round().clamp(-126, 126) + 0.5)
        x[..., 0] = 127


def _tiny(q: Tensor, k: Tensor) -> None:
    q *= 2.0**-20
    k *= 2.0**-20


def _signs(q: Tensor, k: Tensor) -> None:
    q.sign_()
    k.sign_()


INPUTS = (
    _one_huge_row,
    _outlying_channel,
    _constant,
    _zeros_but_one_row,
    _between_integers,
    _tiny,
)


def judged(
    problem: Problem, kernel: Kernel, how: Quantiser, inputs: list[Tensor]
) -> tuple[Ratios, float]:
    """Error over bound, and the median bound of LSE."""
    q, k, v = inputs
    arithmetic = resolve(kernel.numerics, Config(), problem, kernel.arch)
    truth = compute_truth(problem, (q, k, v), [arithmetic])
    found = ratios(problem, emulate_given(problem, kernel, how, (q, k, v)), truth)
    return found, float(truth.lse_bound.median())


@pytest.mark.parametrize("change", INPUTS, ids=lambda change: change.__name__)
def test_hand_made_inputs_stay_within_the_bound(change: Callable[[Tensor, Tensor], None]) -> None:
    for turn, how in enumerate(HOW[::3]):
        kernel = HONEST[turn % 5]
        problem = Problem(
            heads_q=2,
            heads_kv=2,
            seqlen_q=18,
            seqlen_kv=35,
            head_dim=16,
            dtype=kernel.dtypes[turn % 2],
            softmax_scale=(1.0, 0.25, -0.01)[turn % 3],
        )
        found, bound = judged(problem, kernel, how, given(problem, turn, change))
        assert found.worst <= 1, f"{kernel.name}, {how}: r = {found.worst:.3g}"
        assert math.isfinite(bound)


def climbed(kernel: Kernel, how: Quantiser, steps: int) -> float:
    """The largest error over bound that is found by changing Q and K and keeping what is worse."""
    problem = Problem(seqlen_q=4, seqlen_kv=6, head_dim=8, dtype="float32", softmax_scale=0.5)
    generator = torch.Generator().manual_seed(steps)
    best = given(problem, steps, lambda q, k: None)
    worst = judged(problem, kernel, how, best)[0].worst
    for _ in range(steps):
        q, k, v = (x.clone() for x in best)
        for x in (q, k):
            some = torch.rand(x.shape, generator=generator) < 0.2
            x.add_(some * torch.randn(x.shape, generator=generator) * 0.3)
        found = judged(problem, kernel, how, [q, k, v])[0].worst
        if found > worst:
            worst, best = found, [q, k, v]
    return worst


@pytest.mark.parametrize("centred", ["none", "float32"])
def test_a_climb_finds_no_honest_kernel_outside(centred: str) -> None:
    """It comes near the bound: the worst case of every integer is nearly reached at once."""
    kernel = HONEST[4].but(centred=centred, query_scaled=False)
    found = climbed(kernel, Quantiser("tile"), 100)
    assert {"none": 0.5, "float32": 0.35}[centred] < found <= 1


# Faults

SMALL = "sq=9,skv=96,d=16,scale=1.0,dist=small_integers,seed=1,dtype=float16"
NORMAL = "sq=40,skv=70,d=32,seed=1,dtype=float16"
ROWS = "sq=17,skv=33,d=64,mask=causal,seed=1,dtype=float16"
FAULTS = {
    "factor of K of the next tile": NORMAL,
    "factor of Q of the next tile": NORMAL,
    "factor of K forgotten": NORMAL,
    "factor of Q forgotten": NORMAL,
    "factor of K off by 3 %": SMALL,
    "factors of K by column": ROWS,
    "first row alone of K": ROWS,
    "wraps at 128": NORMAL,
    "cut": SMALL,
    "mean not added back": NORMAL,
    "factor of V forgotten": NORMAL,
    "factors of V of the next column": ROWS,
    "largest of the first key": NORMAL,
    "drops the last key": ROWS,
    "causal off by one": ROWS,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_exceed_the_bound(fault: str) -> None:
    problem = Problem.parse(FAULTS[fault])
    kernel = PLAIN.but(centred="input" if fault == "mean not added back" else "none")
    if "of V" in fault or fault == "largest of the first key":
        kernel = EIGHT
    truth = truth_of(problem, kernel.numerics, kernel.arch)
    assert ratios(problem, emulate_integers(problem, kernel, Quantiser()), truth).worst <= 1
    if fault in ("drops the last key", "causal off by one"):
        faulty = emulate_integers(problem, kernel.but(fault=fault), Quantiser())
    else:
        faulty = emulate_integers(problem, kernel, Quantiser(fault=fault))
    assert ratios(problem, faulty, truth).worst > 1


def test_a_scale_that_is_wrong_by_one_per_cent_exceeds_the_bound() -> None:
    """Where all elements are as large as the largest, half a step is 1 / 254 of each: both operands
    together hide 0.8 per cent of a score, and no more."""
    problem = Problem(seqlen_q=4, seqlen_kv=20, head_dim=64, dtype="float16", softmax_scale=1.0)
    found = {}
    for wrong in (1.0, 1.004, 1.01, 0.99):
        inputs = given(problem, 1, _signs)
        inputs[1][:, :, :4] = inputs[0]  # each row has a key like itself
        arithmetic = resolve(OURS, Config(), problem, "sm_90")
        truth = compute_truth(problem, (inputs[0], inputs[1], inputs[2]), [arithmetic])
        scaled = problem.but(softmax_scale=wrong)
        result = emulate_given(scaled, PLAIN, Quantiser(), (inputs[0], inputs[1], inputs[2]))
        found[wrong] = ratios(problem, result, truth).worst
    assert found[1.0] <= 1
    assert found[1.004] <= 1
    assert found[1.01] > 1
    assert found[0.99] > 1


# What the bound must be


def test_what_a_column_of_values_loses() -> None:
    """One key: O is V, rounded to 4 bits by the factor of its column, or to half the smallest
    subnormal number; then the rounding of P and that of O."""
    problem = Problem(seqlen_q=1, seqlen_kv=2, head_dim=1, head_dim_v=2, dtype="float32")
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2, 1)
    v = torch.tensor([[448.0, 448.0], [448.0, 1e-4]]).view(1, 1, 2, 2)
    arithmetic = resolve(EIGHT.but(centred="none").numerics, Config(), problem, "cpu")
    found = compute_truth(problem, (q, k, v), [arithmetic])
    even = (1 + 2.0**-4) ** 2 - 1
    assert float(found.out_bound[..., 0]) == pytest.approx(448 * even, rel=1e-3)
    want = 224 * even + 2.0**-10
    assert float(found.out_bound[..., 1]) == pytest.approx(want, rel=1e-3)
    zeros = compute_truth(problem, (q, k, torch.zeros_like(v)), [arithmetic])
    assert float(zeros.out_bound.max()) == 0


def test_half_a_step_of_both_operands() -> None:
    """One query and two keys of one element; all are the largest of their tile, 127 steps."""
    problem = Problem(seqlen_q=1, seqlen_kv=2, head_dim=1, dtype="float32", softmax_scale=1.0)
    q, k = (torch.full((1, 1, n, 1), x) for n, x in ((1, 3.0), (2, 5.0)))
    numerics = flat_numerics(quantised_products="int8", probability="float32", exp="vexp")
    truth = compute_truth(problem, (q, k, k), [resolve(numerics, Config(), problem, "cpu")])
    by_query, by_key = 3.0 / 254, 5.0 / 254
    want = by_query * (5 + by_key) + 3 * by_key
    assert float(truth.lse_bound) == pytest.approx(want, rel=1e-3)


def test_what_is_less_than_half_a_step_loses_no_more_than_itself() -> None:
    problem = Problem(seqlen_q=2, seqlen_kv=1, head_dim=1, dtype="float32", softmax_scale=1.0)
    q, k = torch.tensor([1e-6, 100.0]).view(1, 1, 2, 1), torch.ones(1, 1, 1, 1)
    numerics = flat_numerics(quantised_products="int8", probability="float32", exp="vexp")
    truth = compute_truth(problem, (q, k, k), [resolve(numerics, Config(), problem, "cpu")])
    assert float(truth.lse_bound[0, 0, 0]) < 4e-6
    own = flat_numerics(
        quantised_products="int8", query_tile=1, probability="float32", exp="vexp", floor=2.0**-11
    )
    high = compute_truth(problem, (q, k, k), [resolve(own, Config(), problem, "cpu")])
    assert float(high.lse_bound[0, 0, 1]) > float(truth.lse_bound[0, 0, 1])


def test_zeros_are_exact() -> None:
    problem = Problem.parse("sq=3,skv=20,d=16,dist=counting,dtype=float16")
    plain = truth_of(problem, flat_numerics(block_n=32), "sm_90")
    found = truth_of(problem, OURS, "sm_90")
    assert float((found.out_bound / plain.out_bound - 1).abs().nan_to_num().max()) < 1e-5
    assert float((found.lse_bound / plain.lse_bound - 1).abs().max()) < 1e-5


def test_a_factor_is_the_largest_of_a_tile() -> None:
    problem = Problem(heads_q=2, seqlen_q=5, seqlen_kv=4, head_dim=2, dtype="float32")
    q = torch.arange(20.0).view(1, 2, 5, 2)
    k = torch.tensor([1.0, -7.0, 2.0, 5.0]).view(1, 1, 4, 1).expand(1, 1, 4, 2)
    numerics = flat_numerics(quantised_products="int8", query_tile=2, key_tile=3)
    arithmetic = resolve(numerics, Config(), problem, "cpu").integers
    assert arithmetic is not None
    found = Steps.of(problem, q, k, arithmetic)
    want = torch.tensor([[3, 3, 7, 7, 9], [13, 13, 17, 17, 19]])
    assert torch.allclose(found.queries * 127, want.double(), rtol=1e-6)
    want = torch.tensor([[7, 7, 7, 5]])
    assert torch.allclose(found.keys * 127, want.double(), rtol=1e-6)
    chosen = Steps.of(problem, q, k, arithmetic, torch.tensor([4, 0]))
    assert torch.equal(chosen.queries, found.queries[:, [4, 0]])


def test_tiles_come_from_the_config_where_nothing_is_declared() -> None:
    problem = Problem(seqlen_q=5, seqlen_kv=4, head_dim=2, dtype="float16")
    numerics = flat_numerics(quantised_products="int8", query_tile=None, key_tile=None)
    found = resolve(numerics, Config(block_m=64, block_n=32), problem, "cpu").integers
    assert found is not None
    assert (found.query_tile, found.key_tile) == (64, 32)


def test_the_mean_makes_the_bound_tighter_where_keys_have_one() -> None:
    problem = Problem(seqlen_q=4, seqlen_kv=40, head_dim=32, dtype="float16", softmax_scale=0.1)
    q, k, v = given(problem, 3, _outlying_channel)
    bounds = []
    for centred in ("none", "input"):
        declared = PLAIN.but(centred=centred).numerics
        truth = compute_truth(problem, (q, k, v), [resolve(declared, Config(), problem, "sm_90")])
        bounds.append(float(truth.out_bound.mean()))
    assert bounds[1] < bounds[0] / 2


def test_rows_whose_factors_leave_the_range_are_not_judged() -> None:
    problem = Problem(seqlen_q=2, seqlen_kv=2, head_dim=1, dtype="float32", softmax_scale=1.0)
    q, k = torch.tensor([2.0**-110, 1.0]).view(1, 1, 2, 1), torch.ones(1, 1, 2, 1)
    arithmetic = resolve(flat_numerics(quantised_products="int8"), Config(), problem, "cpu")
    found = compute_truth(problem, (q, k, k), [arithmetic])
    assert found.lse_bound[0, 0].isinf().tolist() == [True, False]
    found = compute_truth(problem, (k, q, k), [arithmetic])
    assert found.lse_bound[0, 0].isinf().tolist() == [True, True]


def test_errors_are_not_predicted() -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    assert "quantised" in str(underived(resolve(OURS, Config(), problem, "cpu")))
