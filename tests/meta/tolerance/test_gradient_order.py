"""Gradients whose sums have a declared order: honest kernels stay inside bounds that are several
times tighter, and a kernel that adds in another order does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.backward_inputs import Inputs, exact
from tests.harness.declared import flat_gradients
from tests.harness.emulated_sums import fused_dot, serial_dot
from tests.harness.emulation import Luck
from tests.harness.emulation_backward import NAMES, BackwardKernel
from tests.harness.honest_backwards import HALF, SINGLE, arithmetic, truth_of
from tests.harness.ordered_backwards import (
    ASCENDING,
    HONEST,
    SHAPES,
    WHOLE_FIRST,
    climbed,
    ordered,
    parts,
    turned,
)
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.mma import NearestChain, Unit, unit_for
from verify.problem import Problem
from verify.tolerance import backward, gradients_order
from verify.tolerance.backward import gradient_truth, resolve
from verify.tolerance.gradients_order import (
    STEP,
    InOrder,
    Magnitudes,
    Partial,
    error_in_order,
    steps_of,
)
from verify.variant import Config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(3)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_inside(kernel: BackwardKernel):
    """A sample of `python3 -m tests.harness.ordered_backwards`."""
    for seed, shape in enumerate(SHAPES[:4], 1):
        problem = Problem.parse(f"{shape},dtype={kernel.dtypes[seed % len(kernel.dtypes)]}")
        assert max(climbed(problem, turned(kernel, seed), seed, 2)) <= 1, problem.name


# One product, of weights that are known.


def limits(unit: Unit, weights: Tensor, operand: Tensor, whole_first: bool = False) -> Tensor:
    """What the sums of weights (1, rows, terms) times an operand (1, terms, dim) may be off by."""
    sums, sizes = (
        weights.double() @ operand.double(),
        weights.double().abs() @ operand.double().abs(),
    )
    partial = Partial.zeros(1, sums, turned=False)
    partial.add(weights, operand, None, 0)
    terms = torch.full_like(sums[..., :1], weights.shape[-1])
    given = Magnitudes(sums, sizes, torch.zeros_like(sums), terms)
    return error_in_order(partial, InOrder(unit, 0.0, 0, whole_first), given, lambda x: x)


def added(unit: Unit, weights: Tensor, operand: Tensor) -> Tensor:
    """Their sums, in the order of the terms."""
    if isinstance(unit, NearestChain):
        return serial_dot(weights.float(), operand.float()).double()
    return fused_dot(weights.float(), operand.float(), unit).double()


UNITS = {
    "sm_90": (unit_for("sm_90", "float16"), "bfloat16"),
    "sm_80": (unit_for("sm_80", "float16"), "float16"),
    "sm_70": (unit_for("sm_70", "float16"), "float16"),
    "fma": (unit_for("sm_90", "float32"), "float32"),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_climb_stays_inside_the_bound_of_one_product(name: str):
    """Single terms are changed, and kept if the worst element comes nearer; most errors of a chain
    have one sign if its terms are all rounded up or down."""
    unit, kind = UNITS[name]
    dtype, worst = dtype_named(kind).torch, 0.0
    generator = torch.Generator().manual_seed(len(name))

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    weights = (rand(1, 6, 70) * 2.0 ** torch.randint(-4, 1, (1, 6, 70), generator=generator)).to(
        dtype
    )
    operand = (1 - 0.1 * rand(1, 70, 8)).to(dtype)
    operand[:, 35:] *= -1.0
    for step in range(40):
        change = torch.where(rand(*weights.shape) < 0.1, 2 * rand(*weights.shape), 1.0)
        tried = (weights.float() * change).to(dtype) if step else weights
        off = (added(unit, tried, operand) - tried.double() @ operand.double()).abs()
        ratio = float((off / limits(unit, tried, operand)).max())
        assert ratio <= 1
        if ratio >= worst:
            weights, worst = tried, ratio
    assert worst > 0.05


@pytest.mark.parametrize("name", UNITS)
def test_blocks_seen_whole_come_first(name: str):
    """Every way to take three parts of the blocks."""
    unit, kind = UNITS[name]
    dtype = dtype_named(kind).torch
    weights = torch.ones(1, 2, 6 * STEP, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    operand = (1 - 0.2 * torch.rand(1, 6 * STEP, 4, generator=generator)).to(dtype)
    operand[:, 2 * STEP : 4 * STEP] *= -1.0
    most = limits(unit, weights, operand, whole_first=True)
    assert bool((most > limits(unit, weights, operand)).all())
    for first in range(7):
        for last in range(first, 7):
            at = torch.arange(6).repeat_interleave(STEP)
            rank = torch.where((at >= first) & (at < last), 0, torch.where(at < first, 1, 2))
            order = torch.argsort(rank, stable=True)
            found = added(unit, weights[..., order], operand[:, order])
            off = (found - weights.double() @ operand.double()).abs()
            assert bool((off <= most).all())


def test_what_fp32_cannot_hold_is_not_taken_for_nothing():
    """Weights that fp32 flushes, times large operands."""
    unit = UNITS["fma"][0]
    weights = torch.full((1, 1, 64), 2.0**-160, dtype=torch.float64)
    operand = torch.full((1, 64, 1), 2.0**100, dtype=torch.float64)
    chain = float((weights * operand.mT).cumsum(-1).sum()) * 2.0**-unit.fraction
    assert float(limits(unit, weights, operand)) >= chain


def test_terms_are_cut_at_multiples_of_a_step():
    for first, count in ((0, 40), (5, 3), (13, 3), (13, 40), (32, 16), (7, 0)):
        found = list(steps_of(first, count))
        assert [at for part in found for at in range(count)[part]] == list(range(count))
        assert len({(first + part.start) // STEP for part in found}) == len(found)
        for part in found:
            assert (first + part.start) // STEP == (first + part.stop - 1) // STEP


# Whole backwards.


def returning(problem: Problem, small: float) -> Inputs:
    """Rows of equal P, of which dV adds up 256 and -256, each sixteen times, and then small terms.

    Each block of 16 rows has one sign.
    """
    dtype = dtype_named(problem.dtype).torch
    dout = torch.full(problem.shape_out, small * 2.0**8)
    dout[..., :STEP, :] = 2.0**8
    dout[..., STEP : 2 * STEP, :] = -(2.0**8)
    q, k, v = (torch.zeros(shape) for shape in (problem.shape_q, problem.shape_k, problem.shape_v))
    return Inputs(*(x.to(dtype) for x in (q, k, v, dout)))


@pytest.mark.parametrize(
    ("kernel", "small"),
    [(HALF, 0.7 * 2.0**-21), (SINGLE, 0.7 * 2.0**-20)],
    ids=lambda part: getattr(part, "name", ""),
)
def test_another_order_is_convicted(kernel: BackwardKernel, small: float):
    """One that adds small terms, all lost, to the sum of 16 large ones.  The bound of any order
    lets it pass."""
    problem = Problem.parse(f"sq=328,skv=4,d=16,scale=1.0,dtype={kernel.dtypes[-1]}")
    given = returning(problem, small)
    honest = ordered(kernel)
    shifted = replace(honest, whole=(0.05, 1.0))  # the first block comes last
    undeclared = honest.but(head_dim="any", keys="any", rows="any")
    ratios = [
        float(parts(problem, made, Luck.NEAREST, given, "dv", declared)["dv"].max())
        for made, declared in ((honest, honest), (shifted, honest), (shifted, undeclared))
    ]
    assert ratios[0] <= 1 < ratios[1], ratios
    assert ratios[2] <= 1, ratios


@pytest.mark.parametrize("order", [ASCENDING, WHOLE_FIRST], ids=lambda order: order["rows"])
def test_a_wrong_dq_between_the_two_bounds(order: dict[str, str]):
    """dQ off by 2e-5 of itself, in fp32."""
    problem = Problem.parse("sq=200,skv=200,d=64,mask=window.150.0,dtype=float32")
    saved = exact(problem, Inputs.of(problem))
    one_chain = SINGLE.but(block_m=0, block_n=0)
    for declared, seen in ((one_chain.but(**order), True), (one_chain, False)):
        truth = truth_of(problem, saved, arithmetic(problem, declared))
        ratio = float((2e-5 * truth.dq.abs() / truth.dq_bound).max())
        assert (ratio > 1) == seen, ratio


@pytest.mark.parametrize(
    ("kernel", "dtype", "least"),
    [(SINGLE, "float32", 2.2), (HALF, "float16", 2.2), (HALF, "bfloat16", 2.2)],
    ids=("fp32", "fp16", "bf16"),
)
def test_what_is_known_of_a_gradient_is_narrower(kernel: BackwardKernel, dtype: str, least: float):
    """The median of what is left around the nominal gradient; no bound is larger."""
    problem = Problem.parse(f"sq=200,skv=200,d=64,dtype={dtype}")
    saved = exact(problem, Inputs.of(problem))
    one_chain = kernel.but(block_m=0, block_n=0)
    loose, tight = (
        truth_of(problem, saved, arithmetic(problem, each))
        for each in (one_chain, one_chain.but(**ASCENDING))
    )
    assert loose.intervals is not None
    assert tight.intervals is not None
    for name in NAMES:
        bounds = [getattr(truth, f"{name}_bound") for truth in (loose, tight)]
        assert bool((bounds[1] <= bounds[0] * (1 + 1e-12)).all())
        spans = [truth.intervals[name].reach for truth in (loose, tight) if truth.intervals]
        assert float((spans[0] / spans[1]).median()) > least


@pytest.mark.parametrize(
    ("arch", "dtype", "numerics"),
    [
        ("cpu", "float32", {}),
        ("interpreter", "bfloat16", {}),
        ("sm_999", "float16", {}),
        ("sm_70", "bfloat16", {}),
        ("sm_90", "float16", {"accumulator": "bfloat16"}),
        ("sm_90", "float32", {"float32_products": "tf32x3"}),
        ("sm_90", "float16", {"block_m": 16, "block_n": 16}),
        ("sm_90", "float16", {"atomics": ("dq", "dk", "dv")}),
    ],
)
def test_no_order_is_assumed_where_none_is_known(
    arch: str, dtype: str, numerics: dict[str, object]
):
    problem = Problem.parse(f"sq=40,skv=40,d=32,dtype={dtype}")
    declared = flat_gradients(**({"block_m": 0, "block_n": 0} | ASCENDING | numerics))
    a = resolve(declared, Config(), problem, arch)
    assert {a.order_of(name) for name in NAMES} == {"any"}
    assert a.in_order == bool({"block_m", "atomics"} & set(numerics))


def test_without_a_mask_whole_blocks_first_is_ascending():
    for mask, order in (("", "ascending"), (",mask=causal", "whole_first")):
        problem = Problem.parse(f"sq=40,skv=40,d=32,dtype=float16{mask}")
        declared = ordered(HALF).but(**WHOLE_FIRST).numerics
        a = resolve(declared, Config(), problem, "sm_90")
        assert {a.order_of(name) for name in NAMES} == {order}


def test_sums_that_fp32_cannot_hold_keep_their_bounds():
    """dO and K of about 2^120, of which a sum overflows on its way: no NaN, no larger bound."""
    problem = Problem(
        seqlen_q=40, seqlen_kv=40, head_dim=8, dtype="bfloat16", softmax_scale=2.0**-120
    )
    given = Inputs.of(problem)
    k, dout = given.k.clone(), given.dout.clone()
    k[..., 1] = 2.0**126
    dout[..., 1] = 2.0**125
    saved = exact(problem, Inputs(given.q, k, given.v, dout))
    read = given.q, k, given.v, dout, saved.out, saved.lse
    one_chain = HALF.but(block_m=0, block_n=0)
    loose, tight = (
        gradient_truth(problem, *read, arithmetic(problem, each))
        for each in (one_chain, one_chain.but(**ASCENDING))
    )
    for name in NAMES:
        before, after = (getattr(truth, f"{name}_bound") for truth in (loose, tight))
        assert not after.isnan().any()
        assert bool((after <= before * (1 + 1e-12)).all())


def test_partial_sums_in_fp64_as_on_a_gpu_give_the_same(monkeypatch: pytest.MonkeyPatch):
    problem = Problem.parse("hq=4,hkv=2,sq=40,skv=50,d=16,mask=window.30.10,dtype=float32")
    saved = exact(problem, Inputs.of(problem))
    a = arithmetic(problem, SINGLE.but(block_m=0, block_n=0, **WHOLE_FIRST))
    single = truth_of(problem, saved, a)
    monkeypatch.setattr(gradients_order, "precision", lambda x: torch.float64)
    double = truth_of(problem, saved, a)
    for name in NAMES:
        bounds = [getattr(truth, f"{name}_bound") for truth in (single, double)]
        assert torch.allclose(*bounds, rtol=1e-5, atol=0.0)


def test_tiles_and_blocks_of_the_judge_are_no_matter(monkeypatch: pytest.MonkeyPatch):
    """Where they cut a step in two, that counts as two; head by head as all together."""
    problem = Problem.parse("hq=4,hkv=2,sq=40,skv=50,d=16,mask=window.30.10,dtype=float32")
    saved = exact(problem, Inputs.of(problem))
    a = arithmetic(problem, SINGLE.but(block_m=0, block_n=0, **ASCENDING))
    whole = truth_of(problem, saved, a)
    first = Problem.parse("hq=2,hkv=1,sq=40,skv=50,d=16,mask=window.30.10,dtype=float32")
    given = Inputs.of(problem)
    several = (given.q, 2), (given.k, 1), (given.v, 1), (given.dout, 2), (saved.out, 2)
    read = [x[:, :heads] for x, heads in several]
    alone = gradient_truth(first, *read, saved.lse[:, :2], a)
    for name, heads in (("dq", 2), ("dk", 1), ("dv", 1)):
        bounds = getattr(whole, f"{name}_bound")[:, :heads], getattr(alone, f"{name}_bound")
        assert torch.allclose(bounds[1], bounds[0], rtol=1e-5, atol=0.0)
    monkeypatch.setattr(backward, "_TILE", {"cpu": 1900})
    monkeypatch.setattr(backward, "_BUDGET", {"cpu": 5000})
    monkeypatch.setattr(backward, "_ROWS", 20)
    cut = truth_of(problem, saved, a)
    for name in NAMES:
        before, after = (getattr(truth, f"{name}_bound") for truth in (whole, cut))
        assert bool((after >= before * (1 - 1e-6)).all())
        assert bool((after <= 2 * before).all())
