"""The bounds of dQ, dK and dV on trial: honest arithmetic stays inside, planted faults do not.

Emulations of correct backwards take the part of the hardware (`tests.harness.emulation_backward`);
a sample of distributions, shapes and luck is run here, deterministic and small.
"""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from references.attention import backward
from references.definition import Attention
from tests.harness.backward_inputs import Inputs, exact, nominal
from tests.harness.emulation import Luck
from tests.harness.emulation_backward import NAMES, BackwardKernel, emulate
from tests.harness.honest_backwards import (
    ADDED,
    ALPHA,
    FLOAT,
    FULL,
    HALF,
    HALVES,
    HONEST,
    ROUGH,
    SHAPES,
    SINGLE,
    UNUSUAL,
    arithmetic,
    ratios,
    truth_of,
    worst,
)
from verify.judging.comparison import compare
from verify.judging.lattice import explained
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance import backward as tolerance
from verify.tolerance.backward import (
    BEST,
    resolve,
)
from verify.variant import Config

OWN_FP32, OWN = UNUSUAL[-3:-1]
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


@pytest.mark.first_look(4)
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
            assert truth.intervals is not None
            span = truth.intervals[name]
            part = explained(found[name], span.middle, span.reach, under.output)
            assert bool((part <= 1).all()), f"{kernel.name}, {name}: {part.max()}, {problem.name}"


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
