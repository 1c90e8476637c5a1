"""Known roundings of P and dS, and the lattice of the output: what they let through and what they
see (honest kernels of every kind: `test_tolerance_backward`)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.emulation import Luck
from tests.harness.emulation_backward import NAMES, BackwardKernel, emulate
from tests.harness.honest_backwards import (
    FLOAT,
    FULL,
    HALF,
    HALVES,
    UNUSUAL,
    arithmetic,
    truth_of,
)
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.rounding import cast
from verify.judging.comparison import compare
from verify.judging.known_roundings import finer
from verify.judging.lattice import acceptable, explained
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY
from verify.tolerance.backward import GradientTruth
from verify.tolerance.gradients_known import rounded_to
from verify.tolerance.scratch import Room
from verify.variant import GradientNumerics, ScoreGradient

SCALED, OF_ROUNDED = UNUSUAL[2], UNUSUAL[3]
ORDINARY = "sq=40,skv=72,d=64"
pytestmark = pytest.mark.usefixtures("one_thread")


def judged(
    problem: Problem, kernel: BackwardKernel, declared: BackwardKernel
) -> dict[str, tuple[float, float]]:
    """By gradient: the largest error over today's bound, and over what is known."""
    saved, found = emulate(problem, kernel, Luck.AGAINST, "dv")
    under = arithmetic(problem, declared)
    truth = truth_of(problem, saved, under)
    return {
        name: (
            compare(
                found[name], getattr(truth, name), getattr(truth, f"{name}_bound"), under.output
            ).worst,
            needed(truth, name, found[name]),
        )
        for name in NAMES
    }


def needed(truth: GradientTruth, name: str, got: Tensor) -> float:
    assert truth.intervals is not None
    span = truth.intervals[name]
    return float(explained(got, span.middle, span.reach, dtype_named(str(got.dtype)[6:])).max())


# Faults that the bound of any rounding lets through: the fault, and the gradient that shows it.
FAULTS = (
    ("P truncated", HALF, "dv"),
    ("dS truncated", HALF, "dq"),
    ("dS truncated", HALF, "dk"),
    ("dS truncated", SCALED, "dk"),
    ("P truncated", OF_ROUNDED, "dv"),
    ("P truncated", OF_ROUNDED, "dk"),
    ("products of D in 16 bits", HALF, "dq"),
    ("delta in the input's dtype", HALF, "dk"),
)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("fault", "kernel", "name"), FAULTS, ids=[f"{f}, {k.name}, {n}" for f, k, n in FAULTS]
)
def test_faults_that_were_invisible_are_seen(
    fault: str, kernel: BackwardKernel, name: str, dtype: str
) -> None:
    problem = Problem.parse(f"{ORDINARY},dtype={dtype}")
    assert max(max(pair) for pair in judged(problem, kernel, kernel).values()) <= 1
    bounded, known = judged(problem, kernel.but(fault=fault), kernel)[name]
    assert bounded <= 1
    assert known > 1


@pytest.mark.parametrize("kernel", [HALF, SCALED, OF_ROUNDED], ids=lambda kernel: kernel.name)
def test_a_kernel_that_rounds_less_is_explained_by_a_finer_declaration(
    kernel: BackwardKernel,
) -> None:
    """P in fp32 is not what was declared, and no fault; P truncated is neither."""
    problem = Problem.parse(f"{ORDINARY},dtype=bfloat16")
    finest = list(finer(kernel.numerics, "bfloat16"))[:-1]
    for honest in (kernel.but(**FULL), kernel.but(score_gradient_dtype="float32")):
        saved, found = emulate(problem, honest, Luck.AGAINST, "dq")
        truths = [
            truth_of(problem, saved, arithmetic(problem, replace(kernel, numerics=each)))
            for each in (kernel.numerics, *finest)
        ]
        assert needed(truths[0], "dq", found["dq"]) > 1
        for name in NAMES:
            assert min(needed(truth, name, found[name]) for truth in truths) <= 1
    saved, found = emulate(problem, kernel.but(fault="P truncated"), Luck.NEAREST, "dq")
    for each in (kernel.numerics, *finest):
        truth = truth_of(problem, saved, arithmetic(problem, replace(kernel, numerics=each)))
        assert needed(truth, "dv", found["dv"]) > 1


def test_finer_declarations_leave_out_what_is_declared() -> None:
    first = GradientNumerics()
    found = list(finer(first, "bfloat16"))
    assert len(found) == len({str(each) for each in found}) == 4
    assert first not in found
    assert [each.softmax.source for each in found] == ["saved"] * 3 + ["own"]
    rich = replace(first, score_gradient=ScoreGradient(of="rounded", scaled=True))
    assert len(list(finer(rich, "float16"))) == 16
    assert len(list(finer(first, "float32"))) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_the_known_interval_is_no_wider_and_mostly_far_narrower(dtype: str) -> None:
    problem = Problem.parse(f"sq=64,skv=128,d=64,dtype={dtype}")
    saved, _ = emulate(problem, HALF)
    truth = truth_of(problem, saved, arithmetic(problem, HALF))
    assert truth.intervals is not None
    for name in NAMES:
        span, bound = truth.intervals[name], getattr(truth, f"{name}_bound")
        far = (span.middle - getattr(truth, name)).abs()
        assert bool((far + span.reach <= bound).all())
        cast = span.middle.abs() * problem.format.unit_roundoff
        assert float((bound / (far + span.reach + cast)).median()) > 2
        alone = acceptable(span.middle, span.reach, problem.format) == 1
        assert float(alone.double().mean()) > (0.75 if dtype == "bfloat16" else 0.2)


def test_without_a_cast_nothing_is_known_but_the_last_rounding() -> None:
    problem = Problem.parse(f"{ORDINARY},dtype=bfloat16")
    assert not arithmetic(problem, FLOAT).known_roundings
    assert arithmetic(problem, HALF).known_roundings == ("dq", "dk", "dv")
    only_p = HALF.but(score_gradient_dtype="float32")
    assert arithmetic(problem, only_p).known_roundings == ("dv",)
    of_p = only_p.but(score_gradient_of="rounded")
    assert arithmetic(problem, of_p).known_roundings == ("dq", "dk", "dv")


# The rounding of an interval


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_a_number_of_the_interval_rounds_to_is_inside(dtype: str) -> None:
    """Numbers of fp32 in each interval, flushed or not before and after the cast."""
    made, kind = torch.Generator().manual_seed(5), dtype_named(dtype)
    size = torch.exp2(
        torch.empty(1, 40, 500, dtype=torch.float64).uniform_(-140, 16, generator=made)
    )
    if dtype == "float16":
        size = torch.exp2((size.log2() / 4).round() * 1.0 + size.log2() % 1)
    nominal = size * torch.where(torch.rand(size.shape, generator=made) < 0.5, -1.0, 1.0)
    error = nominal.abs() * torch.exp2(torch.empty_like(size).uniform_(-26, -6, generator=made))
    room = Room()
    room.clear(nominal)
    known = rounded_to(kind, nominal, error, room)
    low, high = known.middle - known.half, known.middle + known.half
    for at in (-1.0, -0.6, 0.0, 0.3, 1.0):
        x = (nominal + at * error).float()
        # of fp32 the nearest number may lie outside the interval
        inside = (x.double() - nominal).abs() <= error
        flushed = torch.where(x.abs() < TINY, 0.0, x)
        for given, again in itertools.product((x, flushed), (False, True)):
            got = given.to(kind.torch).double()
            got = torch.where(again & (got.abs() < TINY), 0.0, got)
            right = (low <= got) & (got <= high) | ~known.half.isfinite() | ~inside
            assert bool(right.all())
    assert float((known.half == 0).double().mean()) > 0.3 or dtype == "float32"


# The lattice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_number_is_explained_iff_it_lies_between_what_the_ends_round_to(dtype: str) -> None:
    made, output = torch.Generator().manual_seed(7), dtype_named(dtype)
    span = (-30, 17) if dtype == "float16" else (-140, 20)
    middle = torch.exp2(torch.empty(20000, dtype=torch.float64).uniform_(*span, generator=made))
    middle *= torch.where(torch.rand(20000, generator=made) < 0.5, -1.0, 1.0)
    reach = middle.abs() * torch.exp2(torch.empty_like(middle).uniform_(-28, 1, generator=made))
    low, high = (cast((middle + side * reach).numpy(), output).double() for side in (-1, 1))
    for at in (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0):
        for off in (0.0, 2.0, -2.0):
            place = off * output.unit_roundoff * middle
            got = cast((middle + at * reach + place).numpy(), output)
            between = (low <= got.double()) & (got.double() <= high)
            part = explained(got, middle, reach, output)
            odd = (part <= 1) != between
            # ties, on which both neighbours are right
            assert bool(((part[odd] - 1).abs() < 1e-6).all())
            assert int(odd.sum()) < 20
    count = acceptable(middle, reach, output)
    assert bool(((count == 1) == (low == high)).all())


def test_special_values() -> None:
    output = dtype_named("float16")
    inf, nan = torch.inf, torch.nan

    def part(got: float, middle: float, reach: float) -> float:
        given = (torch.tensor([x], dtype=torch.float64) for x in (middle, reach))
        return float(explained(torch.tensor([got], dtype=torch.float16), *given, output))

    assert part(nan, 0.0, 1.0) == inf
    assert part(nan, 0.0, inf) == 0
    assert part(inf, 65519.0, 2.0) == 0.5
    assert part(inf, 65519.0, 0.5) == 2
    assert part(-inf, 65519.0, 2.0) > 1
    assert part(65504.0, 65521.0, 0.5) == 2
    assert part(0.0, 0.0, 0.0) == part(-0.0, 0.0, 0.0) == 0
    assert part(2.0**-24, 0.0, 0.0) == inf
    assert part(0.0, 0.01, 0.001) > 1
    assert part(1.0, 1 - 2.0**-12, 0.0) == 0  # half a place below a power of two
    assert part(1.0, 1 - 2.0**-11, 2.0**-13) == 2
