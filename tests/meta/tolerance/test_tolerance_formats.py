"""What bounds must be: infinite where fp16 may overflow, larger for lenient declarations; formats
that hold one another."""

from __future__ import annotations

import pytest
import torch

from tests.harness.declared import flat_numerics
from tests.harness.emulation import Luck, emulate
from tests.meta.tolerance.test_tolerance import ratios, truth_of
from tests.meta.tolerance.test_tolerance_bound import blocks_of, bound_of, with_operands
from tests.meta.tolerance.test_tolerance_narrow import HONEST
from verify.problem import Problem
from verify.problem.inputs import stored_factors
from verify.tolerance.derived import holding
from verify.tolerance.forward import bound, resolve
from verify.variant import Config

WIDE = {"score_accumulator": "float32"}
HALVES = {"exp": "ex2.approx.f16", "rescale_exp": "ex2.approx", "probability": "float16"}
pytestmark = pytest.mark.usefixtures("one_thread")


def test_infinite_where_an_fp16_accumulator_may_overflow():
    for values, promotion, beyond in (
        ([30000.0] * 3, 0, True),
        ([10000.0] * 3, 0, False),
        ([30000.0] * 3, 1, False),
    ):
        found = with_operands(
            [0.0],
            [0.0] * 3,
            values,
            accumulator="float16",
            promotion=promotion,
            dtype="float16",
            **WIDE,
        )
        assert bool(found.out.isinf().all()) == beyond
        assert bool(found.lse.isfinite().all())
    large = with_operands(
        [300.0, 1.0],
        [300.0],
        [1.0],
        dtype="float16",
        softmax_scale=0.01,
        score_accumulator="float16",
    )
    assert large.out[0].isinf().flatten().tolist() == [True, False]
    assert large.lse[0].isinf().tolist() == [True, False]


@pytest.mark.parametrize(
    ("looser", "tighter"),
    [
        ({"accumulator": "float16"}, {"score_accumulator": "float16"}),
        ({"accumulator": "float16", **WIDE}, {}),
        ({"accumulator": "float16", **WIDE}, {"accumulator": "float16", "promotion": 64, **WIDE}),
        (
            {"accumulator": "float16", "promotion": 64},
            {"accumulator": "float16", "promotion": "block"},
        ),
        (
            {"promotion": "block", "accumulator": "float16"},
            {"promotion": 32, "accumulator": "float16"},
        ),
        ({"exp": "exp2_poly3"}, {"exp": "exp2_poly3", "rescale_exp": "ex2.approx"}),
        ({"exp": "exp2_poly3", "rescale_exp": "ex2.approx"}, {}),
        ({"exp": "__expf"}, {"exp": "expf"}),
        (HALVES, {}),
        ({"maximum_lag": 8.0}, {}),
        ({"row_sum_of": "rounded"}, {"row_sum_of": "rounded", "row_sum_lanes": 2}),
        ({"row_sum_of": "rounded"}, {"row_sum_of": "mma"}),
        ({}, {"row_sum_lanes": 2}),
        ({"row_sum_lanes": 4}, {"row_sum_lanes": 4, "row_sum_apart": True}),
        ({}, {"division": "div.full"}),
        ({"division": "div.full"}, {"division": "rcp.approx"}),
        ({"division": "rcp.approx"}, {"division": "div.rn"}),
    ],
    ids=str,
)
def test_more_lenient_declarations_give_larger_bounds(
    looser: dict[str, object], tighter: dict[str, object]
):
    problem = "sq=20,skv=128,d=64,scale=0.02,dist=same_sign_v,dtype=float16"
    loose, tight = (bound_of(problem, flat_numerics(**changes)) for changes in (looser, tighter))
    assert bool((loose.out >= tight.out).all())
    assert bool((loose.lse >= tight.lse).all())
    assert bool((loose.out > tight.out).any() or (loose.lse > tight.lse).any())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulator": "float16", "probability": "float32"}, "accumulator.*float16"),
        ({"score_accumulator": "float16", "operands": "float32"}, "score_accumulator.*float16"),
        ({"row_sum_of": "mma", "normalised": True}, "row_sum.*mma"),
        ({"row_sum_lanes": 0}, "row_sum.lanes: 0"),
        ({"maximum_lag": 20.0}, "maximum.lag.*20"),
        ({"maximum_lag": -1.0}, "maximum.lag.*-1"),
    ],
    ids=str,
)
def test_what_is_not_derived_is_refused(changes: dict[str, object], message: str):
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    with pytest.raises(ValueError, match=message):
        resolve(flat_numerics(**changes), Config(), problem, "sm_90")


def test_descales_below_one_hide_how_large_the_sums_were():
    """In fp16 what the unit adds up overflows, not what is left of it when it has been descaled."""
    kernel = HONEST[-1]
    text = (
        "sq=2,skv=300,d=128,dtype=float8_e4m3fn,out=bfloat16,scale=0.01,descale=head,"
        "dist=negative_lse,seed=98"
    )
    problem = Problem.parse(text)
    result = emulate(problem, kernel, Luck.NEAREST)
    assert not bool(result.lse.isfinite().all())
    assert ratios(problem, result, truth_of(problem, kernel.numerics, kernel.arch)).worst <= 1
    for seed, overflows in ((2, True), (3, True), (3, False)):
        problem = Problem.parse(
            f"sq=1,skv=2,d=16,dv=1,dtype=float8_e5m2,out=bfloat16,descale=tensor,scale=0.0,seed={seed}"
        )
        factor = float(stored_factors(problem)["descale_v"])
        v = torch.full((2, 1), (40960.0 if overflows else 28672.0) * factor)
        block = blocks_of(
            problem, *(x.double()[None, None] for x in (torch.ones(1, 16), torch.ones(2, 16), v))
        )
        found = bound(
            block,
            resolve(
                flat_numerics(accumulator="float16", score_accumulator="float32"),
                Config(),
                problem,
                "sm_89",
            ),
            problem,
        )
        assert bool(found.out.isinf().all()) == overflows
        assert bool(found.lse.isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "field", "value"),
    [
        ("float32", "operands", "float16"),
        ("float16", "operands", "bfloat16"),
        ("bfloat16", "operands", "float16"),
        ("float16", "operands", "float8_e4m3fn"),
        ("float8_e4m3fn", "operands", "float8_e5m2"),
        ("float32", "probability", "float16"),
    ],
)
def test_formats_that_the_inputs_do_not_fit_are_refused(dtype: str, field: str, value: str):
    """What Q, K and V lose by a cast is not derived; a wider format loses nothing."""
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype=dtype)
    with pytest.raises(ValueError, match=f"numerics.[a-z]+.{field}: .*'{value}'"):
        resolve(flat_numerics(**{field: value}), Config(), problem, "sm_90")
    assert (
        resolve(flat_numerics(**{field: "float32"}), Config(), problem, "sm_90").output
        == problem.format_out
    )


def test_formats_hold_one_another():
    assert holding("float8_e4m3fn") == (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
    )
    assert holding("float16") == ("float64", "float32", "float16")
    assert holding("bfloat16") == ("float64", "float32", "bfloat16")
