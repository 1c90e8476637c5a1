"""Q K^T in a declared order (`order.head_dim`): honest kernels stay inside a bound that is
several times tighter, and a kernel that adds in another order does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.backward_inputs import Inputs
from tests.harness.cancelling import IN_ORDER, climbed, forward_ratios, of, ones
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Emulation, Kernel, Luck
from tests.meta.tolerance.test_tolerance import HONEST, truth_of, truth_under
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import Config, Order

pytestmark = pytest.mark.usefixtures("one_thread")
ASCENDING = flat_numerics(block_n=64, order_head_dim="ascending")
FLASH = flat_numerics(block_n=64, order_head_dim="ascending", row_sum_lanes=4, row_sum_apart=True)
E4M3 = Kernel("e4m3", ASCENDING, dtypes=("float8_e4m3fn",), eight="wgmma")


@pytest.mark.parametrize("kernel", [*IN_ORDER, E4M3], ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_inside(kernel: Kernel):
    """Of sums that return towards zero, and of ordinary ones."""
    for seed, shape in enumerate(("sq=6,skv=48,d=64", "hq=2,hkv=1,sq=5,skv=40,d=40,scale=1.0")):
        problem = Problem.parse(f"{shape},dtype={kernel.dtypes[0]}")
        ratios = [ratio for ratio, _ in climbed(of(kernel), problem, 2 + seed, 4)]
        assert max(ratios) <= 1, problem.name
        inputs = tensors(problem)
        shapes = problem.shape_q, problem.shape_k, problem.shape_v
        q, k, v = (
            x.expand(shape) for x, shape in zip((inputs.q, inputs.k, inputs.v), shapes, strict=True)
        )
        found = forward_ratios(problem, kernel, Luck.AGAINST, Inputs(q, k, v, v))
        assert max(float(ratio.max()) for ratio in found.values()) <= 1


def returning(problem: Problem, small: float, shuffled: bool) -> Inputs:
    """Rows whose products are 256, -256 and many small ones; shuffled: -256 comes last."""
    terms = torch.full((problem.head_dim,), small * 2.0**8)
    terms[0], terms[1] = 2.0**8, -(2.0**8)
    factors = torch.full((problem.head_dim,), 2.0**-8)
    factors[:2] = 1.0
    if shuffled:
        terms, factors = (torch.cat((x[:1], x[2:], x[1:2])) for x in (terms, factors))
    dtype = dtype_named(problem.dtype).torch
    q, k = (
        x.expand(shape).to(dtype)
        for x, shape in ((factors, problem.shape_q), (terms, problem.shape_k))
    )
    v = torch.ones(problem.shape_v, dtype=dtype)
    return Inputs(q, k, v, v)


@pytest.mark.parametrize(
    ("kernel", "small"),
    [
        (IN_ORDER[0], 0.99 * 2.0**-17),
        (IN_ORDER[2], 0.99 * 2.0**-15),
        (IN_ORDER[4], 1.02 * 2.0**-16),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_another_order_is_convicted(kernel: Kernel, small: float):
    """Truncated, or always rounded up, beside 256.  The bound of any order lets it pass."""
    problem = Problem.parse(f"sq=3,skv=5,d=128,scale=1.0,dtype={kernel.dtypes[0]}")
    given, moved = (returning(problem, small, shuffled) for shuffled in (False, True))
    ratios = []
    for inputs, declared in (
        (given, kernel),
        (moved, kernel),
        (moved, kernel.but(order_head_dim="any")),
    ):
        run = Emulation(problem, kernel, Luck.NEAREST, ones(problem))
        made = run.run(inputs.q, inputs.k, inputs.v)
        arithmetic = resolve(declared.numerics, Config(), problem, kernel.arch)
        # In exact arithmetic both have the same results.
        truth = compute_truth(problem, (given.q, given.k, given.v), [arithmetic])
        single = dtype_named("float32")
        ratios.append(float(compare(made.lse, truth.lse, truth.lse_bound, single).ratio.max()))
    assert ratios[0] <= 1 < ratios[1], ratios
    assert ratios[2] <= 1, ratios


@pytest.mark.parametrize(
    ("arch", "dtype", "least"),
    [
        ("sm_90", "float16", 1.8),
        ("sm_80", "bfloat16", 2.5),
        ("sm_90", "float32", 1.8),
        ("sm_90", "float8_e4m3fn", 4.0),
        ("sm_80", "float32", 1.8),
    ],
)
def test_the_bound_of_lse_is_tighter(arch: str, dtype: str, least: float):
    """Beside the same kernel in any order, four lanes declared in both."""
    problem = Problem.parse(f"sq=16,skv=256,d=128,dtype={dtype}")
    given = replace(FLASH, order=Order())
    loose, tight = (truth_of(problem, each, arch) for each in (given, FLASH))
    assert bool((tight.lse_bound <= loose.lse_bound).all())
    assert bool((tight.out_bound <= loose.out_bound).all())
    assert float((loose.lse_bound / tight.lse_bound).median()) > least


@pytest.mark.parametrize(
    ("arch", "dtype", "numerics"),
    [
        ("cpu", "float32", {}),
        ("cpu", "float16", {}),
        ("interpreter", "bfloat16", {}),
        ("sm_75", "float16", {}),
        ("sm_999", "float16", {}),
        ("sm_70", "bfloat16", {}),
        ("sm_90", "float16", {"score_accumulator": "float16"}),
        ("sm_90", "float32", {"float32_products": "tf32x3"}),
        ("sm_100", "float8_e4m3fn", {"instruction": "mma.sync"}),
    ],
)
def test_no_order_is_assumed_where_none_is_known(
    arch: str, dtype: str, numerics: dict[str, object]
):
    problem = Problem.parse(f"sq=4,skv=8,d=32,dtype={dtype}")
    declared = flat_numerics(order_head_dim="ascending", **numerics)
    assert not resolve(declared, Config(), problem, arch).in_order


def test_sums_that_fp32_cannot_hold_keep_their_bounds():
    """Scores of about 2^127 that cancel, and others: no NaN, and no bound grows."""
    problem = Problem(seqlen_q=2, seqlen_kv=3, head_dim=64, dtype="bfloat16", softmax_scale=1.0)
    q = torch.full(problem.shape_q, 2.0**60, dtype=torch.bfloat16)
    k = torch.full(problem.shape_k, 2.0**62, dtype=torch.bfloat16)
    k[..., 32:] *= -1
    k[..., 1, :] = 2.0**-60
    v = torch.ones(problem.shape_v, dtype=torch.bfloat16)
    truths = []
    for order in ("any", "ascending"):
        a = resolve(flat_numerics(order_head_dim=order), Config(), problem, "sm_90")
        assert a.in_order == (order == "ascending")
        truths.append(compute_truth(problem, (q, k, v), [a]))
    for name in ("out_bound", "lse_bound"):
        before, after = (getattr(truth, name) for truth in truths)
        assert not after.isnan().any()
        assert bool((after <= before).all())


def test_a_score_mod_and_grouped_heads():
    """Batches, heads that share keys, softcap and masks: as head by head without them."""
    problem = Problem.parse(
        "b=2,hq=4,hkv=2,sq=9,skv=33,d=24,dv=16,softcap=20.0,mask=causal,dtype=bfloat16"
    )
    arithmetic = resolve(ASCENDING, Config(), problem, "sm_90")
    whole = truth_under(problem, arithmetic)
    q, k, v = dequantised(problem, tensors(problem))
    single = Problem.parse("sq=9,skv=33,d=24,dv=16,softcap=20.0,mask=causal,dtype=bfloat16")
    for batch, head in ((0, 1), (1, 2)):
        keys = slice(head // 2, head // 2 + 1)
        given = (
            q[batch : batch + 1, head : head + 1],
            k[batch : batch + 1, keys],
            v[batch : batch + 1, keys],
        )
        alone = compute_truth(single, given, [arithmetic])
        torch.testing.assert_close(alone.lse_bound[0, 0], whole.lse_bound[batch, head])
    assert HONEST[0].numerics.order == Order()
