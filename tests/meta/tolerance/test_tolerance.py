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

from tests.harness.declared import flat_numerics
from tests.harness.drawn_inputs import drawn
from tests.harness.emulation import Kernel, Luck, Result, emulate
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import dequantised
from verify.tolerance.forward import BEST, ForwardArithmetic, resolve
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
    return compute_truth(problem, dequantised(problem, drawn(problem)), [arithmetic])


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


@pytest.mark.first_look(3)
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


def test_parts_in_16_bits_are_within_the_bound_that_declares_them_alone():
    """With P in fp32 the parts' roundings are as large as that of O."""
    kept, undeclared = 0.0, 0.0
    numerics = flat_numerics(block_n=32, split_keys="input", probability="float32")
    kernel = Kernel("parts", numerics, style="split")
    for dtype, distribution, luck in itertools.product(
        ("float16", "bfloat16", "float32"), ("normal", "one_hot_v", "v_mean"), Luck
    ):
        text = f"hq=2,hkv=2,sq=17,skv=40,d=16,mask=causal,dtype={dtype},dist={distribution},seed=1"
        problem = Problem.parse(text)
        arithmetic = resolve(numerics, Config(), problem, kernel.arch)
        assert (arithmetic.partial is None) == (dtype == "float32")
        result = emulate(problem, kernel, luck)
        of = [replace(arithmetic, partial=None), arithmetic]
        found = [ratios(problem, result, truth_under(problem, each)).worst for each in of]
        undeclared, kept = max(undeclared, found[0]), max(kept, found[1])
    assert undeclared > 1 >= kept > 0.5


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
