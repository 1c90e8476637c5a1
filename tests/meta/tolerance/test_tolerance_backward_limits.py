"""The bounds of dQ, dK and dV themselves: exact zeros are asked for, overflow is not judged,
leniency has an order."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.quantisation import ByHead
from references.score_mods import Softcap
from tests.harness.backward_inputs import Inputs, exact, nominal
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.emulation import Result
from tests.harness.emulation_backward import NAMES, BackwardKernel, emulate
from tests.harness.honest_backwards import (
    ALPHA,
    HALF,
    HONEST,
    SINGLE,
    arithmetic,
    numerics,
    truth_of,
)
from verify.problem import Problem
from verify.tolerance.backward import GradientTruth, gradient_truth, resolve
from verify.variant import Config, GradientNumerics


@pytest.mark.parametrize(
    "kernel", [HALF, HONEST[3], HONEST[8], SINGLE], ids=lambda kernel: kernel.name
)
def test_bound_is_zero_where_the_result_is_exact(kernel: BackwardKernel):
    """Rows without a key, keys that no query sees, zero columns of V or K, a scale of 0."""
    dtype = kernel.dtypes[0]
    problem = Problem.parse(
        f"hq=2,hkv=1,sq=12,skv=7,d=16,mask=causal+lengths.12.5,dtype={dtype},dist=zero_v_columns"
    )
    saved, found = emulate(problem, kernel)
    truth = truth_of(problem, saved, arithmetic(problem, kernel))
    empty, unseen = torch.arange(12) < 5, torch.arange(7) >= 5
    for name, place in (("dq", empty), ("dk", unseen), ("dv", unseen)):
        assert not getattr(truth, name)[:, :, place].any(), name
        assert not getattr(truth, f"{name}_bound")[:, :, place].any(), name
        assert bool((getattr(truth, f"{name}_bound")[:, :, ~place] > 0).all()), name
        assert not found[name][:, :, place].any(), name
    still = problem.but(softmax_scale=0.0)
    truth = truth_of(still, emulate(still, kernel)[0], arithmetic(still, kernel))
    assert not truth.dq_bound.any()
    assert not truth.dk_bound.any()
    assert bool((truth.dv_bound[:, :, ~unseen] > 0).all())


def test_bound_does_not_look_at_what_an_empty_row_saved():
    problem = Problem.parse("sq=12,skv=7,d=16,mask=causal,dtype=float16")
    saved, _ = emulate(problem, HALF)
    before = truth_of(problem, saved, arithmetic(problem, HALF))
    for value in (math.inf, math.nan, 5.0):
        saved.out[:, :, :5], saved.lse[:, :, :5] = value, value
        after = truth_of(problem, saved, arithmetic(problem, HALF))
        for name in NAMES:
            assert torch.equal(getattr(after, f"{name}_bound"), getattr(before, f"{name}_bound")), (
                name
            )


@pytest.mark.parametrize("lengths", ["sq=0,skv=5", "sq=5,skv=0", "sq=0,skv=0"])
def test_no_rows_and_no_keys(lengths: str):
    problem = Problem.parse(f"hq=2,{lengths},d=16,dtype=float16")
    rows = problem.shape_out
    saved = Result(torch.zeros(rows), torch.full(rows[:3], -math.inf))
    truth = truth_of(problem, saved, arithmetic(problem, HALF))
    for name, like in zip(NAMES, (problem.shape_q, problem.shape_k, problem.shape_v), strict=True):
        assert getattr(truth, name).shape == getattr(truth, f"{name}_bound").shape == like
        assert not getattr(truth, f"{name}_bound").any()


def test_what_the_forward_saved_wrong_is_allowed_in_full_and_no_more():
    """An exact backward of O and LSE that are off by a thousandth passes; from the exact ones its
    results are wrong."""
    problem = Problem.parse("hq=2,hkv=1,sq=20,skv=24,d=16,mask=causal,dtype=float32")
    given = Inputs.of(problem)
    right = exact(problem, given)
    off = Result(right.out * 1.001, right.lse + 0.001)
    under = arithmetic(problem, SINGLE)
    of_exact, of_off = (truth_of(problem, saved, under) for saved in (right, off))
    for name, result in nominal(problem, given, off).items():
        error = (result - getattr(of_off, name)).abs()
        assert bool((error <= getattr(of_off, f"{name}_bound")).all()), name
        assert bool((error > getattr(of_exact, f"{name}_bound")).any()), name
        assert bool(
            (
                getattr(of_off, f"{name}_bound") <= error + 1.1 * getattr(of_exact, f"{name}_bound")
            ).all()
        ), name


def with_operands(
    q: list[float],
    k: list[float],
    v: list[float],
    dout: list[float],
    *,
    dtype: str,
    softmax_scale: float = 1.0,
    **changes: object,
) -> GradientTruth:
    """One head, head_dim 1, of exactly saved tensors: as many rows and keys as given."""
    problem = Problem(
        seqlen_q=len(q), seqlen_kv=len(k), head_dim=1, dtype=dtype, softmax_scale=softmax_scale
    )
    given = Inputs(
        *(torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (q, k, v, dout))
    )
    saved = exact(problem, given)
    under = resolve(numerics(**changes), Config(), problem, "sm_90")
    return gradient_truth(
        problem, given.q, given.k, given.v, given.dout, saved.out, saved.lse, under
    )


def infinite(bound: Tensor) -> list[bool]:
    return bound.isinf().flatten().tolist()


def test_infinite_only_where_something_may_overflow():
    ordinary_ = with_operands([1.0, 1.0], [1.0, -1.0], [1.0, 2.0], [1.0, 1.0], dtype="float16")
    assert not any(
        infinite(ordinary_.dq_bound) + infinite(ordinary_.dk_bound) + infinite(ordinary_.dv_bound)
    )
    # dS of the second row passes fp16: its dQ, both dK; not where dS stays fp32 or bf16.
    operands = [0.0, 0.0], [1.0, -1.0], [600.0, -600.0], [1.0, 600.0]
    found = with_operands(*operands, dtype="float16")
    assert (infinite(found.dq_bound), infinite(found.dk_bound)) == ([False, True], [True, True])
    assert not any(infinite(found.dv_bound))
    for changes in ({"dtype": "float16", "score_gradient_dtype": "float32"}, {"dtype": "bfloat16"}):
        assert not any(infinite(with_operands(*operands, **changes).dq_bound)), changes
    # Q K^T, dO V^T, D, the finished sums and P^T dO past fp32's range.
    huge = 3e38
    assert infinite(
        with_operands([huge, 1.0], [2.0], [1.0], [1.0, 1.0], dtype="bfloat16").dq_bound
    ) == [True, False]
    assert infinite(
        with_operands([1.0, 1.0], [1.0], [huge], [2.0, 1.0], dtype="bfloat16").dq_bound
    ) == [True, True]
    assert infinite(
        with_operands([1.0, 1.0], [1.0], [huge / 8], [2.0, 16.0], dtype="bfloat16").dq_bound
    ) == [False, True]
    assert infinite(
        with_operands([0.0], [huge, -huge], [8.0, -8.0], [1.0], dtype="bfloat16").dq_bound
    ) == [True]
    assert infinite(
        with_operands([0.0, 0.0], [1.0], [0.0], [huge, huge], dtype="bfloat16").dv_bound
    ) == [True]
    # Whole rows of them: no inf - inf and no 0 * inf on the way.
    for scale in (1e-30, 1.0, 1e30, 3e38):
        with_huge = with_operands(
            [huge, -huge, 0.0],
            [huge, -huge, 1e-38],
            [huge, 0.0, -huge],
            [huge, 0.0, 1.0],
            dtype="bfloat16",
            softmax_scale=scale,
        )
        for name in NAMES:
            assert not getattr(with_huge, f"{name}_bound").isnan().any()


def test_saved_numbers_that_are_none_ask_for_nothing_in_their_row_and_all_columns():
    problem = Problem.parse("sq=4,skv=3,d=2,dtype=float16")
    for field, value in itertools.product(("out", "lse"), (math.nan, math.inf, -math.inf)):
        saved, _ = emulate(problem, HALF)
        getattr(saved, field)[:, :, 1] = value
        truth = truth_of(problem, saved, arithmetic(problem, HALF))
        for name in NAMES:
            assert getattr(truth, name).isfinite().all()
            assert not getattr(truth, f"{name}_bound").isnan().any()
        if (field, value) != ("lse", math.inf):  # exp(S - inf) is 0, as good a number as any
            assert truth.dq_bound[0, 0, :, 0].isinf().tolist() == [False, True, False, False]
            assert truth.dk_bound.isinf().all()
            assert bool(truth.dv_bound.isinf().all()) == (field == "lse")


def test_hopeless_scores_are_not_judged():
    """A score of 2^40 that is the difference of large products may be off by thousands: any P, so
    any gradient."""
    problem = Problem(seqlen_q=1, seqlen_kv=2, head_dim=2, dtype="float32", softmax_scale=1.0)
    given = Inputs(
        *(
            torch.tensor(x).double()[None, None]
            for x in ([[1.0, 1.0]], [[0, 0], [1e12, -1e12]], [[1, 2], [3, 4]], [[1, 1]])
        )
    )
    saved = exact(problem, given)
    truth = gradient_truth(
        problem,
        given.q,
        given.k,
        given.v,
        given.dout,
        saved.out,
        saved.lse,
        resolve(numerics(), Config(), problem, "cpu"),
    )
    assert truth.dv_bound[0, 0, 1].isinf().all()
    assert truth.dv_bound[0, 0, 0].isfinite().all()


@pytest.mark.parametrize("kernel", ALPHA, ids=lambda kernel: kernel.alpha)
def test_what_a_scale_inside_the_products_makes_subnormal_is_allowed(kernel: BackwardKernel):
    """dS, or Q, times 2^-126 drops most of its bits, and dK is normal; the same declared with the
    scale behind the products is too much."""
    text = "sq=1,skv=228,d=8,dtype=float32,scale=1.1754943508222875e-38,dist=increasing,seed=418282"
    problem, worst = Problem.parse(text), []
    saved, found = emulate(problem, kernel)
    centre = nominal(problem, Inputs.of(problem), saved)
    for declared in (kernel, kernel.but(prescale="none")):
        truth = truth_of(problem, saved, arithmetic(problem, declared))
        rest = truth.dk_bound - (centre["dk"] - truth.dk).abs()
        worst.append(float(((found["dk"].double() - centre["dk"]).abs() / rest).max()))
    assert worst[0] <= 1
    assert worst[1] > 1 or kernel.alpha == "operand"


def test_a_scale_inside_the_products_costs_nothing_at_ordinary_sizes():
    for text in ("sq=33,skv=70,d=32,dtype=float32", "sq=8,skv=129,d=64,dtype=float32,scale=2.0"):
        problem = Problem.parse(text)
        saved, _ = emulate(problem, SINGLE)
        plain, alpha = (
            truth_of(problem, saved, arithmetic(problem, kernel)) for kernel in (SINGLE, ALPHA[0])
        )
        for name in ("dq_bound", "dk_bound", "dv_bound"):
            assert bool((getattr(alpha, name) <= 1.1 * getattr(plain, name)).all()), name


def test_what_a_prescaled_operand_loses_below_the_normal_range_is_allowed():
    """K of fp16 subnormals, multiplied by a scale that drops most of their bits; the same declared
    as exact is too much."""
    problem = Problem.parse("sq=2,skv=200,d=128,scale=0.01,dtype=float16,dist=subnormals,seed=132")
    kernel = HALF.but(prescale="k", sums_roundings=2, wide=True)
    under = arithmetic(problem, kernel)
    saved, found = emulate(problem, kernel)
    centre, worst = nominal(problem, Inputs.of(problem), saved), []
    for declared in (under, replace(under, coarse=0.0)):
        truth = truth_of(problem, saved, declared)
        rest = truth.dk_bound - (centre["dk"] - truth.dk).abs()
        worst.append(float(((found["dk"].double() - centre["dk"]).abs() / rest).max()))
    assert worst[0] <= 1 < worst[1]


# Leniency has an order


DIFFUSE = "hq=4,hkv=2,sq=40,skv=64,d=64,scale=0.02,dist=same_sign_v"


def bounds_under(problem: Problem, arch: str = "sm_90", **changes: object) -> list[Tensor]:
    given = Inputs.of(problem)
    truth = truth_of(
        problem, exact(problem, given), resolve(numerics(**changes), Config(), problem, arch)
    )
    return [truth.dq_bound, truth.dk_bound, truth.dv_bound]


def looser(loose: list[Tensor], tight: list[Tensor]) -> bool:
    """Nowhere tighter, and somewhere looser."""
    pairs = list(zip(loose, tight, strict=True))
    return all(bool((a >= b).all()) for a, b in pairs) and any(
        bool((a > b).any()) for a, b in pairs
    )


@pytest.mark.parametrize(
    ("loose", "tight"),
    [
        ({}, {"probability": "float32"}),
        ({}, {"score_gradient_dtype": "float32"}),
        ({"exp": "fexp_u20"}, {"exp": "exp_u20"}),
        ({"exp": "exp_u20"}, {}),
        ({"scale_roundings": 3}, {}),
        ({"sums_roundings": 2}, {}),
        ({"block_m": 8}, {}),
        ({"block_n": 16}, {}),
        ({}, {"block_m": 0, "block_n": 0}),
        ({"prescale": "k"}, {}),
        ({"delta": "input"}, {}),
        ({"score_gradient_scaled": True}, {}),
        ({"score_gradient_of": "rounded"}, {}),
        ({"exp": "__expf"}, {"exp": "expf"}),
        ({"exp": "ex2.approx.f16"}, {"exp": "ex2.approx"}),
        (
            {"atomics": ("dq", "dk"), "atomics_dtype": "input"},
            {"atomics": ("dq",), "atomics_dtype": "input"},
        ),
        ({"atomics": ("dv",), "atomics_dtype": "input"}, {"atomics": ("dv",)}),
    ],
    ids=str,
)
def test_more_lenient_declarations_give_larger_bounds(
    loose: dict[str, object], tight: dict[str, object]
):
    problem = Problem.parse(f"{DIFFUSE},dtype=float16")
    assert looser(bounds_under(problem, **loose), bounds_under(problem, **tight))


def test_heads_that_are_cast_first_have_larger_bounds():
    problem = Problem.parse(f"{DIFFUSE},dtype=float16")
    cast, summed = bounds_under(problem, group="cast"), bounds_under(problem)
    assert torch.equal(cast[0], summed[0])
    for one, other in zip(cast[1:], summed[1:], strict=True):
        assert float((one / other).median()) > 1.1


def test_older_units_and_softcaps_give_larger_bounds():
    problem = Problem.parse(f"{DIFFUSE},dtype=float16")
    bounds = [bounds_under(problem, arch) for arch in ("sm_70", "sm_75", "sm_80", "sm_90")]
    assert all(itertools.starmap(looser, itertools.pairwise(bounds)))
    capped = problem.but(score_mod=Softcap(5.0), dtype="float32", dtype_out="float32")
    assert looser(bounds_under(capped, softcap_tanh="tanh.approx"), bounds_under(capped))


@pytest.mark.parametrize(
    ("changes", "of_problem", "message"),
    [
        ({"float32_products": "bf16x3"}, {}, "gradients.products.float32_products.*bf16x3"),
        ({"group": "bfloat16"}, {}, "gradients.sums.group.*bfloat16"),
        ({"prescale": "q"}, {}, "gradients.products.prescale.*q"),
        ({"delta": "float8_e5m2"}, {}, "gradients.score_gradient.delta.*float8_e5m2"),
        ({"atomics_dtype": "float8_e5m2"}, {}, "gradients.sums.atomics_dtype.*float8_e5m2"),
        ({"atomics": ("dp",)}, {}, "gradients.sums.atomics.*dp"),
        ({"exp": "exp9"}, {}, "exp9"),
        ({"operands": "int8"}, {}, "gradients.products.operands.*int8"),
        ({"operands": "bfloat16"}, {}, "gradients.products.operands.*bfloat16"),
        ({"operands": "float16"}, {"dtype": "float32"}, "gradients.products.operands.*float16"),
        ({"probability": "bfloat16"}, {}, "gradients.softmax.probability.*bfloat16"),
        (
            {"score_gradient_dtype": "float16"},
            {"dtype": "bfloat16"},
            "gradients.score_gradient.dtype.*float16",
        ),
        ({"probability": "float8_e4m3fn"}, {}, "float8_e4m3fn"),
        ({"score_gradient_dtype": "float8_e5m2"}, {}, "float8_e5m2"),
        ({"softcap_tanh": "tan"}, {}, "tan"),
        ({}, {"dtype_out": "float32"}, "dtype_out.*float32"),
        ({}, {"quantisation": ByHead()}, "descaling.*head"),
        ({}, {"dtype": "float8_e4m3fn"}, "dtype.*float8_e4m3fn"),
        ({}, {"dtype": "float64"}, "dtype.*float64"),
    ],
    ids=str,
)
def test_what_is_not_derived_is_refused(
    changes: dict[str, object], of_problem: dict[str, str], message: str
):
    given = {
        "seqlen_q": 1,
        "seqlen_kv": 1,
        "head_dim": 16,
        "dtype": "float16",
        "score_mod": Softcap(20.0),
    } | of_problem
    with pytest.raises(ValueError, match=message):
        resolve(with_fields(GradientNumerics(), **changes), Config(), Problem(**given), "sm_90")


def test_blocks_come_from_the_declaration_or_the_config():
    problem = Problem(seqlen_q=100, seqlen_kv=70, head_dim=16, dtype="float16")
    config = Config(block_m=32, block_n=64)
    for changes, blocks in (
        ({}, (4, 2)),
        ({"block_m": 10, "block_n": 7}, (10, 10)),
        ({"block_m": 0, "block_n": 0}, (1, 1)),
    ):
        found = resolve(flat_gradients(**changes), config, problem, "sm_90")
        assert (found.blocks_m, found.blocks_n) == blocks
