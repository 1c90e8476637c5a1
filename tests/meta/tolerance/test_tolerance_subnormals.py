"""Subnormal operands in the bounds: sums that the bit-accurate units cut too early stay inside, and
only with what is allowed for it; ordinary inputs have the bounds that they would have without."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.definition import Attention
from references.positions import Sizes
from references.quantisation import ByTensor
from references.row_blocks import row_blocks
from tests.harness.declared import flat_gradients, flat_numerics
from verify.arithmetic.dot import fused_dot
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.mma import Unit, unit_for
from verify.problem import Problem
from verify.problem.inputs import dequantised, dout, stored_factors, tensors
from verify.tolerance.arithmetic import ForwardArithmetic
from verify.tolerance.backward import GradientArithmetic, gradient_truth
from verify.tolerance.backward import resolve as resolve_backward
from verify.tolerance.forward import bound
from verify.tolerance.resolution import resolve
from verify.tolerance.subnormals import Lost, Operands, Weighted
from verify.variant import Config, Numerics

pytestmark = pytest.mark.usefixtures("one_thread")


def normalising(unit: Unit) -> Unit:
    return replace(unit, flush=0.0, wiring=replace(unit.wiring, normalises=True))


def without(a: ForwardArithmetic) -> ForwardArithmetic:
    """The arithmetic of a unit that normalises."""
    operands = replace(a.operands, unit=normalising(a.operands.unit), lost=0.0)
    return replace(
        a, operands=operands, weighted=replace(a.weighted, unit=normalising(a.weighted.unit))
    )


def crafted(kind: str, unit: Unit, groups: int) -> tuple[Tensor, Tensor]:
    """Operands, (groups * L,): the first product of each group has a subnormal factor, and the
    others have what it cuts off."""
    dtype = dtype_named(kind)
    big = 2.0 ** math.floor(math.log2(dtype.max))
    tail = (1 - 2 * dtype.unit_roundoff) * 2.0 ** (dtype.emin - unit.fraction) * big
    root = 2.0 ** math.floor(math.log2(tail) / 2)
    a, b = torch.full((2, groups, unit.products), root, dtype=torch.float64)
    b[:] = tail / root
    a[:, 0], b[:, 0] = dtype.smallest_subnormal, big
    for x in (a, b):
        assert torch.equal(x, x.to(dtype.torch).double())
    return a.flatten(), b.flatten()


CASES = [
    ("sm_90", "float8_e4m3fn"),
    ("sm_89", "float8_e4m3fn"),
    ("sm_90", "float16"),
    ("sm_70", "float16"),
]


def lse_bounds(
    problem: Problem, q: Tensor, k: Tensor, *arithmetics: ForwardArithmetic
) -> list[float]:
    """Of one row and one key."""
    q, k, v = q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    (block,) = row_blocks(q, k, v, Attention(problem.mask, problem.scale))
    return [float(bound(block, a, problem).lse) for a in arithmetics]


@pytest.mark.parametrize("swapped", [False, True], ids=["Q", "K"])
@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_scores_of_subnormal_operands(arch: str, kind: str, swapped: bool):
    """The LSE of a single key is its score."""
    unit = unit_for(arch, kind)
    q, k = crafted(kind, unit, 2)[:: -1 if swapped else 1]
    eight = {"dtype_out": "bfloat16"} if kind.startswith("float8") else {}
    problem = Problem(
        seqlen_q=1,
        seqlen_kv=1,
        head_dim=len(q),
        head_dim_v=1,
        dtype=kind,
        softmax_scale=64.0,
        **eight,
    )
    a = resolve(flat_numerics(block_n=32), Config(), problem, arch)
    stored = (x.to(dtype_named(kind).torch)[None] for x in (q, k))
    error = 64 * abs(float(fused_dot(*stored, torch.zeros(1), unit)) - float(q @ k))
    loose, tight = lse_bounds(problem, q, k, a, without(a))
    assert tight < error <= loose
    assert error > 0.2 * loose


def test_scores_of_descaled_subnormal_operands():
    """What is subnormal before it is descaled is so for the unit."""
    unit = unit_for("sm_90", "float8_e4m3fn")
    q, k = crafted("float8_e4m3fn", unit, 2)
    problem = Problem(
        seqlen_q=1,
        seqlen_kv=1,
        head_dim=len(q),
        head_dim_v=1,
        dtype="float8_e4m3fn",
        dtype_out="bfloat16",
        quantisation=ByTensor(),
        softmax_scale=4.0,
    )
    a = resolve(
        flat_numerics(block_n=32, scale_roundings=3, output_roundings=1), Config(), problem, "sm_90"
    )
    factor = {name: float(x) for name, x in stored_factors(problem).items()}
    stored = (x.to(torch.float8_e4m3fn)[None] for x in (q, k))
    scale = 4.0 * factor["descale_q"] * factor["descale_k"]
    error = scale * abs(float(fused_dot(*stored, torch.zeros(1), unit)) - float(q @ k))
    loose, tight = lse_bounds(
        problem, q * factor["descale_q"], k * factor["descale_k"], a, without(a)
    )
    assert tight < error <= loose
    assert error > 0.2 * loose


@pytest.mark.parametrize("prescale", ["q", "sqrt"])
def test_operands_that_the_scale_makes_subnormal(prescale: str):
    """Normal fp16 numbers, of which the product with a small scale keeps few bits."""
    scale = 2.0**-20
    by_q, by_k = {"q": (scale, 1.0), "sqrt": (2.0**-10, 2.0**-10)}[prescale]
    q, k = torch.full((2, 16), 1.0, dtype=torch.float64)
    q[:], k[:] = 3.3125 / by_q * 2.0**-24, 2.0**15
    problem = Problem(
        seqlen_q=1, seqlen_kv=1, head_dim=16, head_dim_v=1, dtype="float16", softmax_scale=scale
    )
    a = resolve(flat_numerics(block_n=32, prescale=prescale), Config(), problem, "sm_90")
    stored = [(x * by).half()[None] for x, by in ((q, by_q), (k, by_k))]
    error = abs(
        float(fused_dot(*stored, torch.zeros(1), unit_for("sm_90", "float16")))
        - scale * float(q @ k)
    )
    loose, tight = lse_bounds(problem, q, k, a, without(a))
    assert tight < error <= loose


@pytest.mark.parametrize("swapped", [False, True], ids=["dO", "V"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_70"])
def test_gradients_of_subnormal_operands(arch: str, swapped: bool):
    """Of one key, dP is D and dS is 0; what the unit cuts off dP is all that dK = dS Q shows."""
    unit = unit_for(arch, "float16")
    out_gradient, v = crafted("float16", unit, 2)[:: -1 if swapped else 1]
    problem = Problem(
        seqlen_q=1, seqlen_kv=1, head_dim=1, head_dim_v=len(v), dtype="float16", softmax_scale=1.0
    )
    a = resolve_backward(
        flat_gradients(probability="float32", score_gradient_dtype="float32"),
        Config(),
        problem,
        arch,
    )
    a = replace(a, output=dtype_named("float32"))
    q, k, values, d = (
        x.view(1, 1, 1, -1)
        for x in (torch.ones(1).double(), torch.zeros(1).double(), v, out_gradient)
    )
    error = abs(
        float(fused_dot(out_gradient.half()[None], v.half()[None], torch.zeros(1), unit))
        - float(out_gradient @ v)
    )

    def dk_bound(a: GradientArithmetic) -> float:
        return float(
            gradient_truth(
                problem, q, k, values, d, values, torch.zeros(1, 1, 1).double(), a
            ).dk_bound
        )

    tight = dk_bound(replace(a, factors=replace(a.factors, unit=normalising(a.factors.unit))))
    assert tight < error <= dk_bound(a)


def sums(kind: str, unit: Unit, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights as fp32 has them and operands, (600, 4 L): a large share of both subnormal, of one
    sign or both."""
    dtype = dtype_named(kind)
    low = dtype.emin - dtype.precision
    shape = 600, 4 * unit.products
    found = []
    for top in (0, min(8, math.floor(math.log2(dtype.max)))):
        exponent = low + (top - low) * torch.rand(shape[0], 1, generator=generator) * torch.rand(
            shape, generator=generator
        )
        found.append(
            (1 + torch.rand(shape, generator=generator)).double()
            * torch.exp2(exponent.floor().double())
        )
    signs = 1 - 2 * torch.randint(0, 2, shape, generator=generator) * torch.randint(
        0, 2, (600, 1), generator=generator
    )
    return found[0].clamp(max=1.0), (found[1] * signs).to(dtype.torch).double()


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_weighted_sums_lose_no_more_than_is_allowed(arch: str, kind: str):
    """P V and its like, beyond kappa of what was rounded."""
    unit, dtype, generator = (
        unit_for(arch, kind),
        dtype_named(kind),
        torch.Generator().manual_seed(7),
    )
    weights, operand = sums(kind, unit, generator)
    crafts = [crafted(kind, unit, 4), crafted(kind, unit, 4)[::-1]]
    weights = torch.cat([weights, *(a[None] / max(1.0, float(a.max())) for a, _ in crafts)])
    operand = torch.cat([operand, *(b[None] for _, b in crafts)])
    rounded = weights.to(dtype.torch).double()
    got = fused_dot(
        rounded.to(dtype.torch), operand.to(dtype.torch), torch.zeros(len(weights)), unit
    ).double()
    error, n = (got - (rounded * operand).sum(-1)).abs(), weights.shape[1]
    size = (rounded * operand.abs()).sum(-1)
    terms = ((rounded * operand) != 0).sum(-1).double()
    alone = unit.kappas(terms, n) * size + unit.underflow(n)
    small = weights.clamp(max=dtype.smallest_subnormal / 2)
    lost = Lost((small * operand.abs()).sum(-1), small.sum(-1))
    found = Weighted(unit, dtype, dtype, n)
    reach = (weights * operand.abs()).sum(-1)
    allowed = found.loss(terms, weights.sum(-1), reach, lost)
    assert bool((error <= alone + allowed).all())
    assert bool((error > alone).any()), "what is allowed for misalignment is idle"
    least = torch.where(operand == 0, torch.inf, operand.abs()).amin(-1)
    assert bool(
        (
            error
            <= alone + found.loss(terms, weights.sum(-1), reach, lost, least < found.threshold)
        ).all()
    )


def test_sizes_leave_out_what_is_not_finite():
    x = torch.tensor([[0.0, -3.0, math.inf], [0.0, math.nan, 0.0], [0.5, -math.inf, 2.0]])
    found = Sizes.of(x, -1)
    assert found.most.flatten().tolist() == [3.0, 0.0, 2.0]
    assert found.least.flatten().tolist() == [3.0, math.inf, 0.5]
    assert Sizes.of(x[:, :0], -1).most.flatten().tolist() == [0.0] * 3


def test_a_row_of_normal_numbers_loses_nothing():
    """Nor one of zeros: what is exact stays so."""
    unit, dtype = unit_for("sm_89", "float8_e4m3fn"), dtype_named("float8_e4m3fn")
    operands = Operands(unit, dtype)
    normal, zero = (
        Sizes.of(torch.tensor([[2.0**-6, 448.0, 0.0]]), -1),
        Sizes.of(torch.zeros(1, 3), -1),
    )
    small = Sizes.of(torch.tensor([[2.0**-9, 0.0]]), -1)
    assert float(operands.loss(16, normal, normal)) == float(operands.loss(16, zero, normal)) == 0.0
    assert float(operands.loss(16, small, normal)) == unit.misalignment(16, dtype, 448.0)
    assert float(operands.loss(16, small, zero)) == unit.misalignment(16, dtype, 2.0**-6)
    # A CPU's bf16 products align nothing, but take subnormals for zero.
    unit, dtype = unit_for("cpu", "bfloat16"), dtype_named("bfloat16")
    tiny = Sizes.of(torch.tensor([[2.0**-130, 1.0]]).double(), -1)
    flushing = Operands(unit, dtype, lost=unit.flush)
    assert float(flushing.loss(1, normal, normal)) == 0.0
    assert float(flushing.loss(1, tiny, normal)) == 2.0**-126 * 448.0 * (1 + unit.kappa(1))


def forward_bounds(text: str, arch: str, numerics: Numerics) -> list[Tensor]:
    """O's and LSE's, as they are and with units that normalise."""
    problem = Problem.parse(text)
    a = resolve(numerics, Config(), problem, arch)
    q, k, v = dequantised(problem, tensors(problem))
    (block,) = row_blocks(q, k, v, Attention(problem.mask, problem.scale, problem.score_mod))
    found = [bound(block, x, problem) for x in (a, without(a))]
    return [found[0].out, found[1].out, found[0].lse, found[1].lse]


SHAPE = "hq=4,hkv=2,sq=40,skv=90,d=64,mask=causal"


@pytest.mark.parametrize(
    ("text", "arch", "most"),
    [
        ("dtype=bfloat16", "sm_90", 0.0),
        ("dtype=float32", "sm_90", 0.0),
        ("dtype=float16,dist=small_integers", "sm_90", 1e-3),
        ("dtype=float16", "sm_90", 1e-3),
        ("dtype=float16", "sm_70", 1e-3),
        ("dtype=float16", "cpu", 0.0),
        ("dtype=float8_e4m3fn,out=bfloat16", "sm_90", 0.02),
        ("dtype=float8_e4m3fn,out=bfloat16,descale=head", "sm_89", 0.04),
        ("dtype=float8_e5m2,out=bfloat16", "sm_100", 1e-3),
    ],
)
def test_ordinary_inputs_have_the_bounds_that_they_had(text: str, arch: str, most: float):
    """8 bits of N(0, 1) are subnormal in every hundredth element; 16 bits hardly ever.  (Of a row,
    other keys may be taken exactly: an element is allowed to have a tighter bound.)"""
    eight = {"probability_scale": 256.0, "promotion": 32} if "float8" in text else {}
    out, plain, lse, plain_lse = forward_bounds(
        f"{SHAPE},{text}", arch, flat_numerics(block_n=32, **eight)
    )
    for one, other in ((out, plain), (lse, plain_lse)):
        ratio = (one / other).nan_to_num(nan=1.0)
        assert 1 - most / 2 <= float(ratio.min()) <= float(ratio.max()) <= 1 + most
        assert 1 <= float(ratio.median()) <= 1 + most / 5


def test_ordinary_gradients_have_the_bounds_that_they_had():
    for dtype, most in (("float16", 2.0**-9), ("bfloat16", 2.0**-12), ("float32", 0.0)):
        problem = Problem.parse(f"{SHAPE},dtype={dtype}")
        a = resolve_backward(flat_gradients(block_m=16, block_n=32), Config(), problem, "sm_90")
        plain = replace(
            a,
            operands=replace(a.operands, unit=normalising(a.operands.unit)),
            factors=replace(a.factors, unit=normalising(a.factors.unit)),
            weights=normalising(a.weights),
            score_gradients=normalising(a.score_gradients),
        )
        q, k, v = dequantised(problem, tensors(problem))
        (block,) = row_blocks(q, k, v, Attention(problem.mask, problem.scale))
        given = (
            q,
            k,
            v,
            dout(problem),
            block.out.view(problem.shape_out),
            block.lse.view(problem.shape_out[:3]),
        )
        one, other = (gradient_truth(problem, *given, x) for x in (a, plain))
        for name in ("dq_bound", "dk_bound", "dv_bound"):
            ratio = (getattr(one, name) / getattr(other, name)).nan_to_num(nan=1.0)
            assert bool((ratio >= 1).all())
            assert float(ratio.max()) <= 1 + most
