"""The mean error of LSE over a campaign: functions that err to one side alone are honest, and a
bias that no row shows is not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from tests.harness.emulated_campaigns import EAGER, HALVES, ONLINE, problems, verdict
from tests.harness.emulation import Kernel, Luck, emulate
from verify.arithmetic.instructions import EXP
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.statistics.forward import predictions
from verify.statistics.pool import Pool, pools
from verify.statistics.rows import Prediction, chosen, summary
from verify.tolerance.arithmetic import U
from verify.tolerance.resolution import resolve
from verify.variant import Config

SHAPES = ("hq=4,sq=16,skv=70,d=32", "hq=2,sq=32,skv=100,d=64,mask=causal")
ORDERED = ONLINE.but(
    name="ordered", key_order="ascending", row_sum_lse="log2", block_n=16, dtypes=HALVES
)
UNIFORM = tuple(name for name, function in EXP.items() if function.uniform)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def made(kernel: Kernel, problem: Problem, luck: Luck) -> tuple[Tensor, Tensor, Prediction, Tensor]:
    """LSE of some rows as computed, exact, and as predicted; and its hard bound."""
    arithmetic = resolve(kernel.numerics, Config(), problem, kernel.arch)
    inputs = dequantised(problem, tensors(problem))
    truth = compute_truth(problem, inputs, [arithmetic])
    rows = chosen(problem.seqlen_q, problem.batch * problem.heads_q, 1.0, problem.seed)
    predicted = predictions(problem, inputs, arithmetic, rows)[1]
    got = emulate(problem, kernel, luck).lse
    found = (x.flatten(0, 1)[:, rows, None].double() for x in (got, truth.lse, truth.lse_bound))
    computed, exact, bound = found
    return computed, exact, predicted, bound


def campaign(
    kernel: Kernel, asked: list[Problem], luck: Luck = Luck.NEAREST, bias: float = 0.0
) -> Pool:
    """The pool of LSE over these problems; bias: added to each."""
    found = []
    for problem in asked:
        got, exact, predicted, bound = made(kernel, problem, luck)
        got = got + bias
        assert bool(((got - exact).abs() <= bound)[predicted.suited].all()), "the bound shows it"
        found.append(verdict(problem, summary("lse", got, exact, predicted)))
    (pool,) = pools(found)
    return pool


@pytest.mark.first_look(4)
@pytest.mark.parametrize("errors", ["up", "down"])
@pytest.mark.parametrize("exp", UNIFORM)
def test_functions_that_err_to_one_side_are_honest(exp: str, errors: str) -> None:
    """Every exponential, and the logarithm, at the edge of what it may be off by."""
    for declared in (ORDERED, ONLINE):
        kernel = replace(declared.but(exp=exp), errors=errors)
        for dtype in ("float32", "bfloat16"):
            pool = campaign(kernel, problems(dtype, SHAPES[:1], 1)[:2], Luck.AGAINST)
            assert not list(pool.excesses), f"{kernel.name}, {dtype}: {pool}"
    # What a function may be off by is a large part of what is allowed.
    if EXP[exp].error > 1e-6 and errors == "up":
        assert abs(pool.mean) > 0.3


def test_other_honest_kernels_have_no_bias() -> None:
    for kernel in (ONLINE.but(arch="sm_80"), EAGER, ONLINE.but(prescale="q"), ORDERED):
        for dtype in HALVES:
            pool = campaign(kernel, problems(dtype, SHAPES, 1))
            assert not list(pool.excesses)
            assert abs(pool.mean) < 0.1


@pytest.mark.parametrize(
    ("dtype", "strength"), [("bfloat16", 2.85e-6), ("float32", 1.9e-6)], ids=["bf16", "fp32"]
)
def test_a_bias_that_no_row_shows_is_convicted(dtype: str, strength: float) -> None:
    """550 rows and more; if all roundings could have one sign, it would need twice as much."""
    asked = problems(dtype, SHAPES, 2)
    for sign in (1, -1):
        pool = campaign(ORDERED, asked, bias=sign * strength)
        assert pool.rows > 550
        assert {name for name, _, _ in pool.excesses} >= {"mean"}
        assert pool.rms < pool.rms_limit
    honest = campaign(ORDERED, asked)
    assert abs(honest.mean) < 0.05
    assert not list(campaign(ORDERED, asked, bias=strength / 2).excesses)


def test_what_is_declared_of_the_lse_makes_its_bias_sharper() -> None:
    (problem, *_) = problems("bfloat16", SHAPES[:1], 1)
    allowed = {
        name: float(made(kernel, problem, Luck.NEAREST)[2].allowance.median()) / U
        for name, kernel in (
            ("any", ORDERED.but(key_order="any", row_sum_lse="any")),
            ("log2", ORDERED.but(key_order="any")),
            ("in order", ORDERED),
        )
    }
    assert allowed["any"] > 1.2 * allowed["log2"] > 1.3 * allowed["in order"] > 20
