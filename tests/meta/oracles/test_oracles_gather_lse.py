"""The LSE of `gather`: the winner's score, by as many roundings as a kernel can make of it."""

from __future__ import annotations

import pytest

from references.masks import Causal
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, PLAIN, acquitted, convicted, trial_of, tried
from tests.meta.tolerance.test_tolerance import HONEST, suits
from verify.judging.launch import Launch
from verify.oracles import gather
from verify.oracles.gather import _lse_error
from verify.problem import Problem
from verify.tolerance.arithmetic import U

GATHERED = PLAIN.but(distribution="gather", mask=Causal())


@pytest.mark.first_look(5)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_pass(kernel: Kernel) -> None:
    """Emulated, with the largest errors of their functions, at small and at large scores."""
    for dtype in kernel.dtypes:
        for shape in (
            "hq=2,sq=9,skv=33,d=64",
            "hq=4,hkv=2,sq=20,skv=20,d=16,mask=causal",
            "sq=5,skv=100,d=128,scale=1.7",
            "sq=5,skv=3,d=24,scale=-0.3",
        ):
            if not suits(kernel, shape):
                continue
            problem = Problem.parse(f"{shape},dtype={dtype},dist=gather")
            trial = trial_of(problem, numerics=kernel.numerics)
            for luck in Luck:
                made = emulate(problem, kernel, luck)
                run = {"out": made.out, "lse": made.lse}
                trial.launches["first"] = Launch(OK, "nan", run)
                assert acquitted(gather.judge(trial)), problem.name


def test_a_scale_that_is_off_by_a_millionth_is_convicted() -> None:
    """It is inside the bound of LSE; 4e-7 is inside that of the roundings."""

    def larger(strength: float):
        return lambda out, lse: lse.mul_(1 + strength)

    for dtype in ("float32", "float16"):
        problem = GATHERED.but(dtype=dtype)
        trial = tried(problem, larger(9e-7))
        truth = trial.truth
        error = 9e-7 * truth.lse.abs().nan_to_num(posinf=0.0)
        assert bool((error <= truth.lse_bound).all())
        convicted(gather.judge(trial), "winning logit")
        assert acquitted(gather.judge(tried(problem, larger(4e-7))))


def test_the_error_is_that_of_eight_roundings() -> None:
    trial = tried(GATHERED)
    size = trial.truth.lse.abs()
    known = _lse_error(trial, trial.truth.lse)
    assert known is not None
    assert bool((known >= 8 * U * size).all())
    assert bool((known <= 8 * U * size + 32 * U)[~trial.truth.empty].all())


@pytest.mark.parametrize(
    "changes",
    [
        {"prescale": "q"},
        {"scores": "input"},
        {"split_keys": True},
        {"normaliser": "lse"},
        {"maximum_lag": 8.0},
        {"row_sum_of": "rounded"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_derived_has_the_bound_alone(changes: dict[str, object]) -> None:
    numerics = HONEST[0].but(**changes).numerics
    trial = tried(GATHERED.but(dtype="float16"), numerics=numerics)
    assert _lse_error(trial, trial.truth.lse) is None
    assert acquitted(gather.judge(trial))
