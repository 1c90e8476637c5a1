"""Bounds relative to partial sums: honest kernels stay inside on sums that return towards zero, and
faults that a bound of magnitudes alone lets pass are seen."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness.backward_inputs import Inputs, exact
from tests.harness.cancelling import SHAPES, climbed, of
from tests.harness.emulation import Kernel
from tests.harness.emulation_backward import BackwardKernel
from tests.harness.honest_backwards import HONEST as BACKWARDS
from tests.harness.honest_backwards import SINGLE, UNUSUAL
from tests.harness.honest_backwards import arithmetic as arithmetic_of
from tests.harness.honest_backwards import truth_of as gradients_of
from tests.meta.tolerance.test_tolerance import HONEST, truth_of
from verify.arithmetic.mma import NearestChain, Unit, unit_for
from verify.arithmetic.units import FMA32
from verify.problem import Problem
from verify.tolerance.partial_sums import of_product

pytestmark = pytest.mark.usefixtures("one_thread")
BY_FMA = HONEST[4]
assert BY_FMA.name == "fp32 by FMA"


@pytest.mark.parametrize(
    "kernel",
    [HONEST[0], HONEST[3], BY_FMA, HONEST[12], BACKWARDS[0], BACKWARDS[4], SINGLE, UNUSUAL[4]],
    ids=lambda kernel: kernel.name,
)
def test_honest_kernels_stay_inside(kernel: Kernel | BackwardKernel):
    """A sample of `python3 -m tests.harness.cancelling`."""
    worst = 0.0
    for seed, shape in enumerate(SHAPES[:2]):
        problem = Problem.parse(f"{shape},dtype={kernel.dtypes[0]}")
        ratios = [ratio for ratio, _ in climbed(of(kernel), problem, 3 + 4 * seed, 5)]
        assert max(ratios) <= 1, problem.name
        worst = max(worst, *ratios)
    assert worst > 0.05


def of_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all of kappa relative to sums of magnitudes."""
    for kind in (Unit, NearestChain):
        monkeypatch.setattr(kind, "split", lambda unit, n: (unit.kappa(n), 0.0))
        monkeypatch.setattr(
            kind, "splits", lambda unit, used, n: (unit.kappas(used, n), torch.zeros_like(used))
        )


PROBLEM = Problem.parse("sq=32,skv=96,d=64,dtype=float32")


def test_a_wrong_scale_between_the_two_bounds(monkeypatch: pytest.MonkeyPatch):
    """softmax_scale off by 3.2e-5 of itself, in fp64 otherwise, in one element or more of O."""
    scaled = Problem.parse(f"{PROBLEM.name},scale={0.125 * (1 + 3.2e-5)!r}")
    for tighter in (True, False):
        if not tighter:
            of_magnitudes(monkeypatch)
        truth = truth_of(PROBLEM, BY_FMA.numerics, "cpu")
        wrong = truth_of(scaled, BY_FMA.numerics, "cpu")
        ratio = float(((wrong.out - truth.out).abs() / truth.out_bound).max())
        assert (ratio > 1) == tighter, ratio


def test_a_wrong_dq_between_the_two_bounds(monkeypatch: pytest.MonkeyPatch):
    """dQ off by 6e-5 of itself."""
    saved = exact(PROBLEM, Inputs.of(PROBLEM))
    for tighter in (True, False):
        if not tighter:
            of_magnitudes(monkeypatch)
        truth = gradients_of(PROBLEM, saved, arithmetic_of(PROBLEM, SINGLE))
        ratio = float((6e-5 * truth.dq.abs() / truth.dq_bound).max())
        assert (ratio > 1) == tighter, ratio


def test_of_product_is_no_more_than_all_of_magnitudes():
    units = (FMA32, unit_for("sm_90", "float16"), unit_for("sm_80", "tf32"))
    for unit, n, operands in itertools.product(units, (1, 16, 100), (0.0, 1e-3)):
        by_size, by_sum = of_product(unit, n, operands)
        whole = (1 + operands) * (1 + unit.kappa(n)) - 1
        assert by_size + by_sum <= whole * (1 + 1e-9)
        if n == 100 and not unit.operand_error:
            assert by_size - operands < 0.6 * (whole - operands)
