"""The forward bound itself: zero, infinite and finite where it must be, and larger for more lenient
declarations and older units."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from references.definition import Attention
from references.masks import Lengths
from references.row_blocks import RowBlock, row_blocks
from references.score_mods import Softcap
from tests.harness.declared import flat_numerics, with_fields
from tests.harness.emulation import Kernel
from tests.meta.tolerance.test_tolerance import ALL, HONEST, SHAPES, truth_of
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import BEST, ForwardBound, bound, resolve
from verify.variant import Config, Numerics

pytestmark = pytest.mark.usefixtures("one_thread")


def blocks_of(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> RowBlock:
    (block,) = row_blocks(q, k, v, Attention(problem.mask, problem.scale, problem.score_mod))
    return block


def bound_of(text: str, numerics: Numerics | None = None, arch: str = "sm_90") -> ForwardBound:
    problem = Problem.parse(text)
    block = blocks_of(problem, *dequantised(problem, tensors(problem)))
    return bound(block, resolve(numerics or Numerics(), Config(block_n=32), problem, arch), problem)


def with_operands(
    q: list[float],
    k: list[float],
    v: list[float],
    *,
    dtype: str,
    softmax_scale: float = 1.0,
    **numerics: object,
) -> ForwardBound:
    """One head, head_dim 1: as many rows and keys as given."""
    problem = Problem(
        seqlen_q=len(q), seqlen_kv=len(k), head_dim=1, dtype=dtype, softmax_scale=softmax_scale
    )
    block = blocks_of(
        problem, *(torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (q, k, v))
    )
    return bound(
        block, resolve(flat_numerics(**numerics), Config(block_n=32), problem, "sm_90"), problem
    )


@pytest.mark.parametrize("arch", ["sm_90", "cpu"])
@pytest.mark.parametrize("dtype", ALL)
def test_bound_is_zero_where_the_result_is_exact(dtype: str, arch: str):
    found = bound_of(f"sq=12,skv=7,d=16,mask=causal,dtype={dtype},dist=zero_v_columns", arch=arch)
    empty = torch.arange(12) < 5
    assert bool((found.out[:, empty] == 0).all())
    assert bool((found.lse[:, empty] == 0).all())
    assert bool((found.out[:, ~empty, 0::4] == 0).all()), "columns of V that are zero"
    assert bool((found.out[:, ~empty, 1::4] > 0).all())
    assert bool((found.lse[:, ~empty] > 0).all())


@pytest.mark.parametrize(
    "kernel", [HONEST[0], HONEST[8], HONEST[9]], ids=lambda kernel: kernel.name
)
def test_bound_is_finite_and_positive(kernel: Kernel):
    names = [name for name in ordinary() if name != "range_edges"]  # whose scores may overflow
    for dtype, distribution, shape in itertools.product(
        kernel.dtypes, names, (SHAPES[1], SHAPES[6])
    ):
        problem = Problem.parse(f"{shape},dtype={dtype},dist={distribution}")
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        for tolerance in (truth.out_bound, truth.lse_bound):
            assert bool(tolerance.isfinite().all()), problem.name
            assert bool((tolerance >= 0).all()), problem.name


@pytest.mark.parametrize("lengths", ["sq=0,skv=5", "sq=5,skv=0", "sq=0,skv=0"])
def test_no_rows_and_no_keys(lengths: str):
    problem = Problem.parse(f"{lengths},d=16,dtype=float16")
    truth = truth_of(problem, Numerics(), "sm_90")
    assert not truth.out_bound.any()
    assert not truth.lse_bound.any()


def test_infinite_only_where_a_product_may_overflow():
    """fp16 scores past 65504 before they are scaled; Q K^T or un-normalised P V past fp32's range;
    nothing else."""
    large = with_operands(
        [300.0, 1.0], [300.0], [1.0], dtype="float16", softmax_scale=0.01, scores="input"
    )
    assert large.out[0, 0].isinf().all()
    assert large.lse[0, 0].isinf()
    assert large.out[0, 1].isfinite().all()
    assert (
        with_operands([300.0], [300.0], [1.0], dtype="float16", softmax_scale=0.01)
        .out.isfinite()
        .all()
    )
    assert (
        with_operands([1.0], [1.0], [1.0], dtype="float16", softmax_scale=0.0, scores="input")
        .out.isinf()
        .all()
    )
    assert (
        with_operands([1.0], [1.0], [1.0], dtype="float16", softmax_scale=2.0, prescale="q")
        .out.isinf()
        .all()
    )
    assert (
        with_operands([1.0], [1.0], [1.0], dtype="bfloat16", softmax_scale=2.0, prescale="q")
        .out.isfinite()
        .all()
    )
    huge = 3e38
    assert with_operands([huge], [2.0], [1.0], dtype="bfloat16").out.isinf().all()
    assert with_operands([0.0], [0.0, 0.0], [huge, huge], dtype="bfloat16").out.isinf().all()
    assert (
        with_operands([0.0], [0.0, 0.0], [huge, 0.0], dtype="bfloat16", normalised=True)
        .out.isfinite()
        .all()
    )
    # Whole rows of them: no inf - inf and no 0 * inf on the way.
    for scale in (1e-30, 1.0, 1e30, 3e38):
        found = with_operands(
            [huge, -huge, 0.0],
            [huge, -huge, 1e-38],
            [huge, 0.0, -huge],
            dtype="bfloat16",
            softmax_scale=scale,
        )
        assert not found.out.isnan().any()
        assert not found.lse.isnan().any()


def test_hopeless_scores_leave_the_range_of_v():
    """Where a score may be off by hundreds, O may be any average of V, and no more: a key far below
    may even win."""
    problem = Problem(seqlen_q=1, seqlen_kv=2, head_dim=2, dtype="float32", softmax_scale=1.0)
    q, v = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [2.0, 5.0]])
    # a logit near -65536 that is the difference of large products
    k = torch.tensor([[0.0, 0.0], [1e12 - 65536.0, -1e12]])
    q, k, v = (x.double().view(1, 1, -1, 2) for x in (q, k, v))
    found = bound(
        blocks_of(problem, q, k, v), resolve(Numerics(), Config(), problem, "cpu"), problem
    )
    assert bool((found.out >= torch.tensor([1.0, 4.0])).all())
    assert bool((found.out <= torch.tensor([1.0, 4.0]) * 1.001).all())
    assert found.lse.isfinite().all()


def test_range_of_v_leaves_out_keys_that_no_row_sees():
    problem = Problem(
        seqlen_q=1,
        seqlen_kv=4,
        head_dim=2,
        dtype="float32",
        mask=Lengths((1,), (2,)),
        softmax_scale=1.0,
    )
    q, k, v = (
        [[1.0, 1.0]],
        [[1e12, -1e12]] * 4,
        [[64.0, 65.0], [65.0, 65.0], [-9.0, -9.0], [-9.0, -9.0]],
    )
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in (q, k, v))
    found = bound(
        blocks_of(problem, q, k, v), resolve(Numerics(), Config(), problem, "cpu"), problem
    )
    assert 1 <= float(found.out[0, 0, 0]) < 1.001
    assert float(found.out[0, 0, 1]) < 0.001


def test_flushing_is_allowed_for_but_not_believed():
    """V of fp32 subnormals may come out as 0 from arithmetic that flushes; V a thousand times
    larger may not."""
    small, large = ([1e-39, 1e-39], [1e-34, 1e-34])
    assert float(with_operands([0.0], [0.0, 0.0], small, dtype="float32").out) > 1e-39
    assert float(with_operands([0.0], [0.0, 0.0], large, dtype="float32").out) < 1e-36


# Leniency has an order


# all P are normal in fp16, so that only unit roundoffs matter
DIFFUSE = "sq=20,skv=64,d=64,scale=0.02,dist=same_sign_v"


@pytest.mark.parametrize(
    ("looser", "tighter"),
    [
        ({"probability": "float16"}, {"probability": "float32"}),
        ({"scores": "input"}, {}),
        ({"prescale": "sqrt"}, {"prescale": "q"}),
        ({"prescale": "q"}, {}),
        ({"exp": "fexp_u20"}, {"exp": "exp_u20"}),
        ({"exp": "exp_u20"}, {"exp": "ex2.approx"}),
        ({"scale_roundings": 3}, {}),
        ({"block_n": 16}, {"block_n": 32}),
        ({"block_n": 32}, {"block_n": 0}),
    ],
    ids=str,
)
def test_more_lenient_declarations_give_larger_bounds(
    looser: dict[str, object], tighter: dict[str, object]
):
    problem = f"{DIFFUSE},dtype=float16"
    loose, tight = (bound_of(problem, flat_numerics(**changes)) for changes in (looser, tighter))
    assert bool((loose.out >= tight.out).all())
    assert bool((loose.lse >= tight.lse).all())
    assert bool((loose.out > tight.out).any() or (loose.lse > tight.lse).any())


def test_older_units_give_larger_bounds():
    bounds = [
        bound_of(f"{DIFFUSE},dtype=float16", arch=arch)
        for arch in ("sm_70", "sm_75", "sm_80", "sm_90")
    ]
    for loose, tight in itertools.pairwise(bounds):
        assert bool((loose.out >= tight.out).all())
        assert bool((loose.lse >= tight.lse).all())


def test_best_is_no_looser_than_any_declaration():
    best = bound_of(f"{DIFFUSE},dtype=bfloat16", BEST)
    for kernel in HONEST:
        if "bfloat16" in kernel.dtypes and kernel.arch == "sm_90":
            assert bool(
                (bound_of(f"{DIFFUSE},dtype=bfloat16", kernel.numerics).out >= best.out).all()
            ), kernel.name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("accumulator", "float64"),
        ("score_accumulator", "float64"),
        ("rescale_exp", "exp9"),
        ("row_sum_of", "pairwise"),
        ("division", "div.rough"),
        ("prescale", "k"),
        ("scores", "float8"),
        ("float32_products", "bf16x3"),
        ("exp", "exp9"),
        ("operands", "int8"),
        ("probability", "float8_e4m3fn"),
        ("softcap_tanh", "tan"),
    ],
)
def test_what_is_not_derived_is_refused(field: str, value: str):
    problem = Problem(
        seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16", score_mod=Softcap(20.0)
    )
    with pytest.raises(ValueError, match=value):
        resolve(with_fields(Numerics(), **{field: value}), Config(), problem, "sm_90")
