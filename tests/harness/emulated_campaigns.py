"""Campaigns of emulated kernels, forwards and backwards, judged by statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tests.harness import emulation, emulation_backward
from tests.harness.backward_inputs import Inputs, nominal
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel
from tests.harness.emulation_backward import BackwardKernel
from verify.evidence import Verdict
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.statistics import forward, gradients
from verify.statistics.pool import Pool, pools
from verify.statistics.rows import Prediction, chosen, summary
from verify.tolerance.forward import resolve
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients
from verify.variant import Config

HALVES = ("float16", "bfloat16")
ONLINE = Kernel("online, sm_90", flat_numerics(block_n=32))
EAGER = Kernel(
    "eager, normalised P",
    flat_numerics(operands="float32", normalised=True, exp="vexp", block_n=0),
    "cpu",
    "eager",
)
HONEST = (
    ONLINE,
    ONLINE.but(name="sm_80", arch="sm_80"),
    EAGER,
    Kernel("fused", flat_numerics(block_n=32, scale_roundings=3), style="fused"),
    Kernel("everything in fp32", flat_numerics(probability="float32", block_n=0)),
    Kernel("prescaled q", flat_numerics(prescale="q", block_n=32)),
    Kernel(
        "scores in the input's dtype",
        EAGER.but(scores="input", operands="input").numerics,
        "sm_90",
        "eager",
    ),
    Kernel("merged halves", flat_numerics(block_n=32, split_keys=True), style="split"),
)
EIGHT = Kernel(
    "8 bits",
    flat_numerics(block_n=32, probability_scale=256.0, promotion=32),
    dtypes=("float8_e4m3fn",),
)
BACKWARD = BackwardKernel("one accumulator", flat_gradients(block_m=16, block_n=32), ONLINE)
HONEST_BACKWARDS = (
    BACKWARD,
    BACKWARD.but(name="cast heads", group="cast", natural=True),
    BACKWARD.but(name="fp32", probability="float32", score_gradient_dtype="float32"),
    BACKWARD.but(name="dS scaled before it is rounded", score_gradient_scaled=True),
    BACKWARD.but(name="dS of rounded P", score_gradient_of="rounded"),
)
SHAPES = (
    "b=2,hq=4,hkv=2,sq=8,skv=70,d=32",
    "hq=4,sq=16,skv=100,d=48,mask=causal",
    "hq=2,sq=32,skv=80,d=32,mask=window.40.0",
)
SQUARE = ("sq=60,skv=64,d=32", "hq=4,hkv=2,sq=48,skv=48,d=16,mask=causal", "hq=2,sq=64,skv=40,d=32")
Change = Callable[[Tensor, Tensor, Prediction], Tensor]  # (computed, exact, predicted) -> computed


def problems(dtype: str, shapes: tuple[str, ...], copies: int = 2) -> list[Problem]:
    names = ("normal", "same_sign_v", "v_mean")
    return [
        Problem.parse(f"{shape},dtype={dtype},dist={name},seed={100 * copy + 10 * place + at}")
        for copy in range(copies)
        for place, shape in enumerate(shapes)
        for at, name in enumerate(names)
    ]


@dataclass(frozen=True)
class Judged:
    """Pools by tensor, and the largest r of O met on the way."""

    pools: dict[str, Pool]
    r: float = 0.0

    def failing(self) -> set[str]:
        return {tensor for tensor, pool in self.pools.items() if list(pool.excesses)}


def verdict(problem: Problem, measures: dict[str, float]) -> Verdict:
    return Verdict(
        case=problem.name,
        variant="emulated",
        config="-",
        dtype=problem.dtype,
        oracle="bound",
        group="accuracy",
        outcome="pass",
        phase="generate",
        problem=problem.name,
        measures=measures,
    )


@dataclass(frozen=True, eq=False)
class Made:
    """What a kernel made of some rows, what is exact, what is predicted, and the hard bound (none
    of gradients)."""

    got: Tensor
    exact: Tensor
    predicted: Prediction
    bound: Tensor | None = None


@cache
def forward_of(kernel: Kernel, problem: Problem, claimed: Kernel) -> dict[str, Made]:
    arithmetic = resolve(claimed.numerics, Config(), problem, claimed.arch)
    inputs = dequantised(problem, tensors(problem))
    truth, result = compute_truth(problem, inputs, [arithmetic]), emulation.emulate(problem, kernel)
    rows = chosen(problem.seqlen_q, problem.batch * problem.heads_q, 1.0, problem.seed)
    out, lse = forward.predictions(problem, inputs, arithmetic, rows)
    got, exact, bound = (x.flatten(0, 1)[:, rows] for x in (result.out, truth.out, truth.out_bound))
    got_lse, exact_lse = (x.flatten(0, 1)[:, rows, None] for x in (result.lse, truth.lse))
    return {"out": Made(got.double(), exact, out, bound), "lse": Made(got_lse, exact_lse, lse)}


@cache
def backward_of(
    kernel: BackwardKernel, problem: Problem, claimed: BackwardKernel
) -> dict[str, Made]:
    saved, made = emulation_backward.emulate(problem, kernel)
    inputs = Inputs.of(problem)
    given = gradients.given_of(
        problem, (inputs.q, inputs.k, inputs.v), inputs.dout, saved.out, saved.lse
    )
    rows = chosen(problem.seqlen_q, problem.batch * problem.heads_q, 1.0, problem.seed)
    keys = chosen(problem.seqlen_kv, problem.batch * problem.heads_kv, 1.0, problem.seed)
    arithmetic = resolve_gradients(claimed.numerics, Config(), problem, claimed.arch)
    predicted = gradients.predictions(problem, given, arithmetic, rows, keys)
    exact, found = nominal(problem, inputs, saved), {}
    for name, places in (("dq", rows), ("dk", keys), ("dv", keys)):
        want, prediction = predicted[name]
        assert torch.allclose(want, exact[name].flatten(0, 1)[:, places], rtol=1e-9, atol=1e-12)
        found[name] = Made(made[name].flatten(0, 1)[:, places].double(), want, prediction)
    return found


def campaign_of(
    asked: list[Problem], cases: list[dict[str, Made]], change: Change | None
) -> Judged:
    found, worst = [], 0.0
    for problem, case in zip(asked, cases, strict=True):
        measures: dict[str, float] = {}
        for name, made in case.items():
            got = (
                made.got
                if change is None or name == "lse"
                else change(made.got, made.exact, made.predicted)
            )
            measures |= summary(name, got, made.exact, made.predicted)
            if made.bound is not None:
                worst = max(
                    worst, float(((got - made.exact).abs() / made.bound).nan_to_num().max())
                )
        found.append(verdict(problem, measures))
    return Judged({pool.tensor: pool for pool in pools(found)}, worst)


def forwards(
    kernel: Kernel,
    asked: list[Problem],
    claimed: Kernel | None = None,
    change: Change | None = None,
) -> Judged:
    """A campaign of an emulated forward that claims to be `claimed`."""
    return campaign_of(
        asked, [forward_of(kernel, problem, claimed or kernel) for problem in asked], change
    )


def backwards(
    kernel: BackwardKernel,
    asked: list[Problem],
    claimed: BackwardKernel | None = None,
    change: Change | None = None,
) -> Judged:
    """The same of an emulated backward."""
    return campaign_of(
        asked, [backward_of(kernel, problem, claimed or kernel) for problem in asked], change
    )
