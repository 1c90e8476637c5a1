"""Declarations of honest backwards, shapes to try them on, and their errors beside the bounds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tests.harness.backward_inputs import Inputs
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Luck, Result
from tests.harness.emulation_backward import NAMES, BackwardKernel, emulate
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.problem import Problem
from verify.tolerance.backward import (
    GradientArithmetic,
    GradientTruth,
    gradient_truth,
    resolve,
)
from verify.variant import Config, GradientNumerics

HALVES, SINGLES = ("float16", "bfloat16"), ("float32",)


def numerics(**changes: object) -> GradientNumerics:
    return flat_gradients(**({"block_m": 16, "block_n": 32} | changes))


def saver(arch: str = "sm_90", **changes: object) -> Kernel:
    return Kernel("saver", flat_numerics(block_n=32, **changes), arch)


FULL = {"probability": "float32", "score_gradient_dtype": "float32"}
COMPOSITE = {
    **FULL,
    "softmax_source": "own",
    "operands": "float32",
    "prescale": "sqrt",
    "exp": "vexp",
    "block_m": 0,
    "block_n": 0,
}
HONEST = (
    BackwardKernel("one accumulator, sm_90", numerics(), saver()),
    BackwardKernel(
        "blocks added, sm_80",
        numerics(block_n=16, atomics=("dq",), scale_roundings=3),
        saver("sm_80"),
        style="partial",
    ),
    BackwardKernel(
        "one chain, sm_70", numerics(block_m=0, block_n=0), saver("sm_70"), dtypes=("float16",)
    ),
    BackwardKernel("cast heads, natural exponents", numerics(group="cast"), saver(), natural=True),
    BackwardKernel("dP begins with -D", numerics(), saver(), style="partial", initial=True),
    BackwardKernel("P and dS in fp32", numerics(**FULL), saver(probability="float32")),
    BackwardKernel(
        "tanh.approx", numerics(softcap_tanh="tanh.approx"), saver(softcap_tanh="tanh.approx")
    ),
    BackwardKernel(
        "CPU, all fp32",
        numerics(exp="exp_u20", operands="float32", **FULL),
        saver("cpu", exp="exp_u20"),
    ),
    BackwardKernel("CPU, 16 bits", numerics(exp="fexp_u20"), saver("cpu")),
    BackwardKernel("fp32 by FMA", numerics(scale_roundings=3), saver(), dtypes=SINGLES),
    BackwardKernel(
        "fp32, cast heads",
        numerics(group="cast"),
        saver(),
        style="partial",
        natural=True,
        dtypes=SINGLES,
    ),
    BackwardKernel(
        "tf32",
        numerics(float32_products="tf32"),
        saver("sm_80", float32_products="tf32"),
        dtypes=SINGLES,
    ),
)
UNUSUAL = (
    BackwardKernel(
        "prescaled K, as Triton's tutorial", numerics(prescale="k", sums_roundings=2), saver()
    ),
    BackwardKernel("D in 16 bits", numerics(delta="input"), saver()),
    BackwardKernel("scaled dS", numerics(score_gradient_scaled=True), saver(), style="partial"),
    BackwardKernel(
        "dS of rounded P",
        numerics(score_gradient_of="rounded", score_gradient_scaled=True),
        saver(),
    ),
    BackwardKernel(
        "memory of 16 bits",
        numerics(atomics=("dq", "dk", "dv"), atomics_dtype="input"),
        saver(),
        style="partial",
    ),
    BackwardKernel("ex2.approx.f16", numerics(exp="ex2.approx.f16"), saver(), dtypes=("float16",)),
    BackwardKernel("__expf", numerics(exp="__expf"), saver()),
    BackwardKernel("Q and K prescaled by roots", numerics(prescale="sqrt"), saver()),
    BackwardKernel(
        "a composite, CPU", numerics(**COMPOSITE), saver("cpu"), dtypes=("float32", *HALVES)
    ),
    BackwardKernel(
        "a composite, CUDA",
        numerics(**COMPOSITE),
        saver(),
        style="partial",
        apart=True,
        dtypes=("float32", *HALVES),
    ),
    BackwardKernel("a softmax of its own, 16 bits", numerics(softmax_source="own"), saver()),
    BackwardKernel(
        "of rounded P, D in 16 bits",
        numerics(softmax_source="own", score_gradient_of="rounded", delta="input"),
        saver(),
    ),
)
HALF, FLOAT, SINGLE = HONEST[0], HONEST[5], HONEST[9]
ROUGH = HALF.but(score_gradient_dtype="float32")
ALPHA = tuple(
    SINGLE.but(name=f"a scale inside the products, times {what}", prescale="alpha", alpha=what)
    for what in ("operand", "ds")
)
ADDED = FLOAT.but(atomics=("dq",), block_n=16, style="partial")
SHAPES = (
    "sq=33,skv=70,d=32",
    "b=2,hq=4,hkv=2,sq=9,skv=40,d=16,mask=causal",
    "b=2,hq=6,hkv=2,sq=20,skv=20,d=16,mask=causal",
    "sq=8,skv=129,d=64,mask=window.20.0",
    "sq=129,skv=9,d=32",
    "hq=4,sq=70,skv=3,d=16",
    "sq=16,skv=48,d=64,scale=-0.125",
    "sq=9,skv=33,d=24,dv=40,softcap=20.0",
    "sq=9,skv=33,d=16,scale=4.0,softcap=1.0",
    "sq=4,skv=40,d=16,scale=0.0",
    "sq=12,skv=30,d=16,mask=dense.50.3",
    "sq=12,skv=7,d=16,mask=causal",
    "b=2,hq=2,hkv=1,sq=20,skv=24,d=16,mask=causal+lengths.10_20.24_7",
    "sq=2,skv=200,d=128,scale=0.01",
    "sq=3,skv=2,d=1,scale=3.0",
    "sq=1,skv=1,d=1",
)


def truth_of(problem: Problem, saved: Result, *arithmetics: GradientArithmetic) -> GradientTruth:
    given = Inputs.of(problem)
    return gradient_truth(
        problem,
        given.q,
        given.k,
        given.v,
        given.dout,
        saved.out.double(),
        saved.lse.double(),
        *arithmetics,
    )


def arithmetic(problem: Problem, kernel: BackwardKernel) -> GradientArithmetic:
    found = resolve(kernel.numerics, Config(), problem, kernel.arch)
    return replace(found, output=dtype_named("float32")) if kernel.wide else found


def ratios(
    problem: Problem, kernel: BackwardKernel, declared: BackwardKernel, luck: Luck, aim: str
) -> dict[str, Tensor]:
    """Error over bound of dq, dk and dv, elementwise, of one emulated run."""
    saved, found = emulate(problem, kernel, luck, aim)
    under = arithmetic(problem, declared)
    truth = truth_of(problem, saved, under)
    return {
        n: compare(found[n], getattr(truth, n), getattr(truth, f"{n}_bound"), under.output).ratio
        for n in NAMES
    }


def worst(found: dict[str, Tensor]) -> float:
    return max(float(ratio.max()) for ratio in found.values())
