"""The bounds of dQ, dK and dV on trial: honest arithmetic stays inside, planted faults do not.

Emulations of correct backwards take the part of the hardware (`tests.harness.emulation_backward`);
a sample of distributions, shapes and luck is run here, deterministic and small.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.attention import backward
from references.definition import Attention
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Luck, Result
from tests.harness.emulation_backward import NAMES, BackwardKernel, Inputs, emulate, exact, nominal
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance import backward as tolerance
from verify.tolerance.backward import (
    BEST,
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
OWN_FP32, OWN = UNUSUAL[-3:-1]
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


pytestmark = pytest.mark.usefixtures("one_thread")


# The reference


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_gradients_are_those_of_the_reference(shape: str):
    problem = Problem.parse(f"{shape},dtype=float16")
    given = Inputs.of(problem)
    attention = Attention(problem.mask, problem.scale, problem.score_mod)
    want = backward(given.q, given.k, given.v, given.dout, attention)
    found = truth_of(problem, exact(problem, given), arithmetic(problem, HALF))
    for name in NAMES:
        size = float(getattr(want, name).abs().max())
        torch.testing.assert_close(
            getattr(found, name), getattr(want, name), rtol=1e-12, atol=1e-13 * size
        )


@pytest.mark.parametrize("kernel", [HALF, HONEST[3]], ids=lambda kernel: kernel.name)
def test_blocks_of_rows_and_heads_do_not_matter(
    kernel: BackwardKernel, monkeypatch: pytest.MonkeyPatch
):
    for shape in (SHAPES[1], SHAPES[2], SHAPES[12]):
        problem = Problem.parse(f"{shape},dtype=float16")
        saved, _ = emulate(problem, kernel)
        whole = truth_of(
            problem, saved, arithmetic(problem, kernel), resolve(BEST, Config(), problem, "sm_90")
        )
        monkeypatch.setattr(tolerance, "_ROWS", 1)
        for budget in (1, 7 * 40 * 2):
            monkeypatch.setattr(tolerance, "_BUDGET", {"cpu": budget})
            parts = truth_of(
                problem,
                saved,
                arithmetic(problem, kernel),
                resolve(BEST, Config(), problem, "sm_90"),
            )
            for name in (*NAMES, *(f"{name}_bound" for name in NAMES)):
                torch.testing.assert_close(
                    getattr(parts, name), getattr(whole, name), rtol=1e-7, atol=1e-12
                )
            assert parts.best_bounds is not None
            assert whole.best_bounds is not None
            for one, other in zip(parts.best_bounds, whole.best_bounds, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-12)
        monkeypatch.undo()


# Honest arithmetic


@pytest.mark.parametrize("kernel", [*HONEST, *UNUSUAL, *ALPHA], ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: BackwardKernel):
    """Every distribution, each with the next shape, dtype, luck and aim in turn; every third with
    results left in fp32.

    Around the nominal gradients, so that no error hides behind what the forward's rounding of O
    takes with the other sign.
    """
    turn, lucks, aims = itertools.count(), itertools.cycle(Luck), itertools.cycle(NAMES)
    for dtype, distribution in itertools.product(kernel.dtypes, ordinary()):
        n = next(turn)
        problem = Problem.parse(f"{SHAPES[n * 5 % len(SHAPES)]},dtype={dtype},dist={distribution}")
        honest = kernel.but(wide=n % 3 == 0)
        saved, found = emulate(problem, honest, next(lucks), next(aims))
        under = arithmetic(problem, honest)
        truth, centre = truth_of(problem, saved, under), nominal(problem, Inputs.of(problem), saved)
        for name in NAMES:
            moved, limit = (
                (centre[name] - getattr(truth, name)).abs(),
                getattr(truth, f"{name}_bound"),
            )
            rest = limit - moved + 2e-14 * centre[name].abs()  # fp64 differs with the order
            # of what was saved as NaN the centre is NaN
            rest = torch.where(limit.isinf(), torch.inf, rest)
            ratio = compare(found[name], centre[name], rest, under.output).worst
            assert ratio <= 1, f"{kernel.name}, {name}: r = {ratio:.3g} for {problem.name}"


@pytest.mark.parametrize("dtype", HALVES)
def test_honest_kernels_use_much_of_the_bound(dtype: str):
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for shape, distribution in itertools.product(SHAPES[:9], ("normal", "low_rank", "v_mean")):
        problem = Problem.parse(f"{shape},dtype={dtype},dist={distribution}")
        for name, ratio in ratios(problem, HALF, HALF, Luck.NEAREST, "dq").items():
            found[name].append(float(ratio.max()))
    for name, values in found.items():
        assert statistics.median(values) >= 0.3, name


def test_unrounded_p_is_no_fault():
    """A kernel may compute better than it declares."""
    for shape, dtype in itertools.product(SHAPES[:4], HALVES):
        problem = Problem.parse(f"{shape},dtype={dtype}")
        assert worst(ratios(problem, HALF.but(**FULL), HALF, Luck.AGAINST, "dk")) <= 1


# Planted faults: (kernel as it computes, what it declares, problem)

LONG, GROUPS = "sq=48,skv=96,d=64", "hq=8,hkv=2,sq=24,skv=48,d=32"
FAULTS: dict[str, tuple[BackwardKernel, BackwardKernel, str]] = {
    **{
        fault: (kernel.but(fault=fault), kernel, problem)
        for fault, kernel, problem in (
            ("no scale in dK", HALF, f"{LONG},dtype=bfloat16"),
            ("no delta", HALF, f"{LONG},dtype=bfloat16"),
            ("delta without O", HALF, f"{LONG},dtype=bfloat16"),
            ("delta of the next row", HALF, f"{LONG},dtype=bfloat16"),
            ("LSE of the other base", HALF, f"{LONG},dtype=bfloat16"),
            ("drops the last block", HALF, "sq=40,skv=500,d=64,dtype=bfloat16"),
            ("a lost pair of blocks", HALF, f"{LONG},dtype=bfloat16"),
            ("heads taken in turn", HALF, f"{GROUPS},dtype=bfloat16"),
            ("first head of a group alone", HALF, f"{GROUPS},dtype=bfloat16"),
            ("causal off by one", HALF, f"{LONG},dtype=bfloat16,mask=causal"),
            ("mask in the forward alone", HALF, f"{LONG},dtype=bfloat16,mask=window.16.0"),
            ("no slope", HALF, f"{LONG},dtype=bfloat16,softcap=1.0"),
            ("scale off by 1e-3", SINGLE, f"{LONG},dtype=float32"),
            ("D of the next row", OWN, f"{LONG},dtype=bfloat16"),
            ("a row sum without its last key", OWN, f"{LONG},dtype=bfloat16"),
            ("fp16 accumulation", FLOAT, "sq=128,skv=16,d=16,dtype=float16"),
        )
    },
    "delta in the input's dtype": (
        HALF.but(delta="input"),
        HALF,
        "sq=16,skv=512,d=64,scale=0.01,dtype=bfloat16,dist=v_mean",
    ),
    "no root of the scale in dK": (
        OWN_FP32.but(fault="no scale in dK"),
        OWN_FP32,
        f"{LONG},dtype=float32",
    ),
    "Q and K prescaled by roots": (
        OWN.but(prescale="sqrt"),
        OWN,
        f"{LONG},dtype=bfloat16,scale=0.9",
    ),
    "D in 16 bits, of P dP": (
        OWN.but(delta="input"),
        OWN,
        "sq=16,skv=512,d=64,scale=0.01,dtype=bfloat16,dist=v_mean",
    ),
    "a cubic exponential, own softmax": (
        OWN_FP32.but(exp="fexp_u20"),
        OWN_FP32,
        f"{LONG},dtype=float32",
    ),
    "P in fp8": (HALF.but(probability="float8_e4m3fn"), HALF, f"{LONG},dtype=bfloat16"),
    "P in bf16, declared fp16": (HALF.but(probability="bfloat16"), HALF, f"{LONG},dtype=float16"),
    "dS in bf16, declared fp16": (
        HALF.but(score_gradient_dtype="bfloat16"),
        HALF,
        f"{LONG},dtype=float16",
    ),
    "dS in bf16, declared fp32": (
        FLOAT.but(score_gradient_dtype="bfloat16"),
        FLOAT,
        f"{LONG},dtype=bfloat16",
    ),
    "P in fp16 under fp32": (SINGLE.but(probability="float16"), SINGLE, f"{LONG},dtype=float32"),
    "tf32, declared ieee": (SINGLE.but(float32_products="tf32"), SINGLE, f"{LONG},dtype=float32"),
    "a cubic exponential": (SINGLE.but(exp="fexp_u20"), SINGLE, f"{LONG},dtype=float32"),
    "tanh.approx, declared tanhf": (
        SINGLE.but(softcap_tanh="tanh.approx"),
        SINGLE,
        f"{LONG},dtype=float32,softcap=20.0",
    ),
    "K prescaled": (HALF.but(prescale="k"), HALF, f"{LONG},dtype=bfloat16,scale=0.9"),
    "K prescaled for another base": (
        HALF.but(prescale="k", fault="another base"),
        HALF.but(prescale="k"),
        f"{LONG},dtype=bfloat16",
    ),
    "dS of rounded P": (ROUGH.but(score_gradient_of="rounded"), ROUGH, f"{LONG},dtype=bfloat16"),
    "dS scaled in fp16": (
        HALF.but(score_gradient_scaled=True),
        HALF,
        f"{LONG},dtype=float16,scale=0.0001",
    ),
    "memory of 16 bits": (
        ADDED.but(atomics_dtype="input"),
        ADDED,
        "sq=16,skv=512,d=16,scale=0.01,dtype=bfloat16,dist=v_mean",
    ),
    "ex2.approx.f16": (HALF.but(exp="ex2.approx.f16"), HALF, f"{LONG},dtype=float16"),
    "heads cast, declared fp32": (FLOAT.but(group="cast"), FLOAT, f"{GROUPS},dtype=bfloat16"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str):
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    # The same problem computed as declared passes: it is the fault that is caught.
    assert worst(ratios(problem, declared, declared, Luck.AGAINST, "dv")) <= 1
    functions = [
        (kernel.numerics.softmax.exp, kernel.numerics.softmax.softcap_tanh)
        for kernel in (faulty, declared)
    ]
    # where the function's error is the fault
    luck = Luck.NEAREST if functions[0] == functions[1] else Luck.AGAINST
    assert worst(ratios(problem, faulty, declared, luck, "dv")) > 1
