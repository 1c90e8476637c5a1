"""The bounds on trial: honest arithmetic stays inside, planted faults do not, and nothing is looser
than it must be.

Emulations of correct kernels take the part of the hardware (`tests.harness.emulation`); a sample of
distributions, shapes and luck is run here, deterministic and small.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from references.definition import Attention
from references.masks import Lengths
from references.row_blocks import RowBlock, row_blocks
from references.score_mods import Softcap
from tests.harness.declared import flat_numerics, with_fields
from tests.harness.emulation import Kernel, Luck, Result, emulate
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import BEST, ForwardArithmetic, ForwardBound, bound, resolve
from verify.variant import Config, Numerics

ALL = ("float16", "bfloat16", "float32")
EAGER = {"normalised": True, "exp": "vexp", "block_n": 0}
HONEST = (
    Kernel("online, sm_90", flat_numerics(block_n=32)),
    Kernel("online, sm_80", flat_numerics(block_n=32), arch="sm_80"),
    Kernel("online, sm_70", flat_numerics(block_n=32), arch="sm_70", dtypes=("float16",)),
    Kernel(
        "fused as FlashAttention-2", flat_numerics(block_n=32, scale_roundings=3), style="fused"
    ),
    Kernel("fp32 by FMA", flat_numerics(block_n=16, scale_roundings=3), dtypes=("float32",)),
    Kernel(
        "fp32 by tf32",
        flat_numerics(block_n=32, float32_products="tf32"),
        arch="sm_80",
        dtypes=("float32",),
    ),
    Kernel("everything in fp32", BEST, dtypes=("float16", "bfloat16")),
    Kernel(
        "torch's CPU flash, fp32",
        flat_numerics(exp="exp_u20", block_n=64),
        arch="cpu",
        dtypes=("float32",),
    ),
    Kernel("torch's CPU flash, 16 bits", flat_numerics(exp="fexp_u20", block_n=64), arch="cpu"),
    Kernel(
        "torch's math",
        flat_numerics(operands="float32", prescale="sqrt", probability="float32", **EAGER),
        arch="cpu",
        style="eager",
        dtypes=ALL,
    ),
    Kernel(
        "torch's eager flex",
        flat_numerics(operands="float32", **EAGER),
        arch="cpu",
        style="eager",
        dtypes=ALL,
    ),
    Kernel(
        "eager in the input's dtype",
        flat_numerics(scores="input", scale_roundings=3, **EAGER),
        style="eager",
    ),
    Kernel("prescaled q", flat_numerics(prescale="q", block_n=32)),
    Kernel("tanh.approx", flat_numerics(softcap_tanh="tanh.approx", block_n=32)),
    Kernel(
        "operands that are normalised",
        flat_numerics(block_n=32),
        dtypes=("float16",),
        normalises=True,
    ),
)
SHAPES = (
    "sq=33,skv=70,d=32",
    "b=2,hq=4,hkv=2,sq=9,skv=40,d=16,mask=causal",
    "sq=8,skv=129,d=64,mask=window.20.0",
    "sq=5,skv=3,d=16",
    "sq=16,skv=48,d=64,scale=-0.125",
    "sq=9,skv=33,d=24,dv=40,softcap=20.0",
    "sq=9,skv=33,d=16,scale=4.0,softcap=1.0",
    "sq=4,skv=40,d=16,scale=0.0",
    "sq=12,skv=30,d=16,mask=dense.50.3",
    "sq=12,skv=7,d=16,mask=causal",
    "sq=2,skv=300,d=128,scale=0.01",
    "sq=1,skv=1,d=1",
)


def truth_of(problem: Problem, numerics: Numerics, arch: str) -> Truth:
    return truth_under(problem, resolve(numerics, Config(), problem, arch))


def truth_under(problem: Problem, arithmetic: ForwardArithmetic) -> Truth:
    return compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])


@dataclass(frozen=True)
class Ratios:
    """Error over bound: out (batch, heads_q, seqlen_q, head_dim_v), lse (batch, heads_q, seqlen_q);
    0 in empty rows."""

    out: Tensor
    lse: Tensor

    @property
    def worst(self) -> float:
        return max(float(part.max()) if part.numel() else 0.0 for part in (self.out, self.lse))


def ratios(problem: Problem, result: Result, truth: Truth) -> Ratios:
    live = ~truth.empty
    out = compare(result.out, truth.out, truth.out_bound, problem.format_out).ratio
    lse = compare(
        result.lse, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
    ).ratio
    return Ratios(torch.where(live[..., None], out, 0.0), torch.where(live, lse, 0.0))


def suits(kernel: Kernel, shape: str) -> bool:
    """The fused style takes the maximum before it scales, so it is for positive scales, and has no
    softcap."""
    return kernel.style != "fused" or not any(
        part in shape for part in ("scale=-", "scale=0.0", "softcap")
    )


pytestmark = pytest.mark.usefixtures("one_thread")


# Honest arithmetic


@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel):
    """Every distribution, each with the next shape, dtype and luck in turn."""
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    lucks = itertools.cycle(Luck)
    turn = itertools.count()
    for dtype in kernel.dtypes:
        for distribution, _ in itertools.product(ordinary(), range(2)):
            shape = shapes[next(turn) * 5 % len(shapes)]
            problem = Problem.parse(f"{shape},dtype={dtype},dist={distribution}")
            luck = next(lucks)
            found = ratios(
                problem,
                emulate(problem, kernel, luck),
                truth_of(problem, kernel.numerics, kernel.arch),
            )
            assert found.worst <= 1, (
                f"{kernel.name}, {luck.value}: r = {found.worst:.3g} for {problem.name}"
            )


SPLIT = Kernel("split", flat_numerics(block_n=32), style="split")


def test_honest_merges_by_lse_stay_within_the_bound_of_merges():
    """Large logits show the fp32 rounding of each part's LSE: outside the bound of one pass over
    the keys, inside this one."""
    single, merged = 0.0, 0.0
    for text, luck in itertools.product(
        (SHAPES[5], "b=2,hq=4,hkv=2,sq=17,skv=40,d=16,mask=causal"), Luck
    ):
        for distribution, seed in (
            ("below_sentinel", 3),
            ("large_logits", 0),
            ("v_mean", 0),
            ("one_hot_v", 0),
        ):
            problem = Problem.parse(f"{text},dtype=float16,dist={distribution},seed={seed}")
            arithmetic, result = (
                resolve(SPLIT.numerics, Config(), problem, SPLIT.arch),
                emulate(problem, SPLIT, luck),
            )
            single = max(single, ratios(problem, result, truth_under(problem, arithmetic)).worst)
            merged = max(
                merged,
                ratios(
                    problem, result, truth_under(problem, replace(arithmetic, merged=True))
                ).worst,
            )
    assert single > 1 >= merged


@pytest.mark.parametrize(
    ("dtype", "name", "distribution"),
    [
        ("float16", "online, sm_90", "one_hot_v"),
        ("bfloat16", "online, sm_90", "one_hot_v"),
        ("float32", "fp32 by FMA", "v_mean"),
    ],
)
def test_honest_kernels_use_much_of_the_bound(dtype: str, name: str, distribution: str):
    kernel = next(kernel for kernel in HONEST if kernel.name == name)
    worst = 0.0
    for shape, luck in itertools.product(SHAPES[:4], Luck):
        problem = Problem.parse(f"{shape},dtype={dtype},dist={distribution}")
        found = ratios(
            problem, emulate(problem, kernel, luck), truth_of(problem, kernel.numerics, kernel.arch)
        )
        worst = max(worst, float(found.out.max()))
    assert 0.3 <= worst <= 1


# Planted faults: (kernel as it computes, what it declares, problem)

HALF = Kernel("half", flat_numerics(block_n=32))
SINGLE = Kernel("single", flat_numerics(block_n=16), dtypes=("float32",))
LONG = "sq=16,skv=96,d=64"
FAULTS: dict[str, tuple[Kernel, Kernel, str]] = {
    "P in fp8": (HALF.but(probability="float8_e4m3fn"), HALF, f"{LONG},dtype=bfloat16"),
    "P in bf16, declared fp16": (
        HALF.but(probability="bfloat16"),
        HALF,
        f"{LONG},dtype=float16,dist=one_hot_v",
    ),
    "scores rounded to fp16": (HALF.but(scores="input"), HALF, f"{LONG},dtype=float16,scale=1.0"),
    "scores rounded to bf16": (HALF.but(scores="input"), HALF, f"{LONG},dtype=bfloat16,scale=1.0"),
    "q prescaled in bf16": (HALF.but(prescale="q"), HALF, f"{LONG},dtype=bfloat16,scale=0.9"),
    "tf32, declared ieee": (SINGLE.but(float32_products="tf32"), SINGLE, f"{LONG},dtype=float32"),
    "a cubic exponential": (SINGLE.but(exp="fexp_u20"), SINGLE, f"{LONG},dtype=float32"),
    "tanh.approx, declared tanhf": (
        SINGLE.but(softcap_tanh="tanh.approx"),
        SINGLE,
        f"{LONG},dtype=float32,softcap=20.0",
    ),
    "P in fp16 under fp32": (SINGLE.but(probability="float16"), SINGLE, f"{LONG},dtype=float32"),
    **{
        fault: (kernel.but(fault=fault), kernel, problem)
        for fault, kernel, problem in (
            ("fp16 accumulation", HALF, "sq=16,skv=256,d=64,dtype=float16,dist=v_mean"),
            ("LSE without the max", HALF, f"{LONG},dtype=float16"),
            ("no rescale", HALF, f"{LONG},dtype=bfloat16"),
            ("drops the last key", HALF, "sq=4,skv=500,d=64,dtype=bfloat16"),
            ("causal off by one", HALF, f"{LONG},dtype=bfloat16,mask=causal"),
            ("scale off by 1e-3", SINGLE, f"{LONG},dtype=float32"),
            ("V off by one row", HALF, f"{LONG},dtype=bfloat16"),
        )
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str):
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    truth = truth_of(problem, declared.numerics, declared.arch)
    # The same problem computed as declared passes: it is the fault that is caught.
    assert ratios(problem, emulate(problem, declared, Luck.AGAINST), truth).worst <= 1
    functions = [
        (kernel.numerics.softmax.exp, kernel.numerics.softmax.softcap_tanh)
        for kernel in (faulty, declared)
    ]
    # where the function's error is the fault
    luck = Luck.NEAREST if functions[0] == functions[1] else Luck.AGAINST
    assert ratios(problem, emulate(problem, faulty, luck), truth).worst > 1


# What the bound must be


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
