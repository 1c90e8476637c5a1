"""Outputs in 8 bits with their own scale: right kernels stay within the bound, faults of the last
step exceed it, and the bound is as tight as the format allows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from references.output_scale import DTYPES as EIGHT_BITS
from references.output_scale import ScaledOutput
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.meta.tolerance.test_tolerance import ratios, truth_of
from verify.arithmetic.dtypes import dtype_named
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance.scaled_output import stored, stored_bound

OURS = flat_numerics(
    scale_roundings=3, probability_scale=256.0, output_roundings=1, block_n=32, promotion=32
)
PROMOTED = Kernel("promoted, sm_90", OURS, dtypes=("float8_e4m3fn", "float8_e5m2"))
WIDE = PROMOTED.but(name="P in bf16", probability="bfloat16")
HALVES = Kernel("16-bit inputs", flat_numerics(block_n=32), dtypes=("float16", "bfloat16"))
HONEST = (
    PROMOTED,
    PROMOTED.but(name="13 bits throughout", promotion=0),
    WIDE,
    HALVES,
    HALVES.but(name="merged halves", style="split", split_keys=True),
)
SHAPES = (
    "sq=33,skv=70,d=32",
    "b=2,hq=4,hkv=2,sq=9,skv=48,d=16,mask=causal",
    "sq=16,skv=100,d=24,dv=40,mask=window.40.0",
    "sq=5,skv=0,d=16",
    "b=2,sq=6,skv=20,d=16,mask=lengths.6_6.20_0",
)
SCALES = (1.0, 16.0, 104.5, 0.375, 448.0, 2.0**15, 2.0**-7)
FAULTS = (
    "scale of O forgotten",
    "scale of O twice",
    "O does not saturate",
    "O truncated",
    "maximum of another format",
)

pytestmark = pytest.mark.usefixtures("one_thread")


def worst(problem: Problem, kernel: Kernel, luck: Luck = Luck.NEAREST) -> float:
    truth = truth_of(problem, kernel.numerics, kernel.arch)
    found = ratios(problem, emulate(problem, kernel, luck), truth)
    return float(found.out.max()) if found.out.numel() else 0.0


@pytest.mark.first_look(2)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_right_kernels_stay_within_the_bound(kernel: Kernel) -> None:
    """Every distribution and input dtype with both formats; shapes, scales and lucks in turn."""
    shapes, scales, lucks = (itertools.cycle(x) for x in (SHAPES, SCALES, [*Luck]))
    for dtype, output, name in itertools.product(kernel.dtypes, EIGHT_BITS, ordinary()):
        problem = Problem.parse(f"{next(shapes)},dtype={dtype},out={output},dist={name}").but(
            output_scale=next(scales), seed=3
        )
        assert worst(problem, kernel, next(lucks)) < 1, problem.name


@pytest.mark.parametrize("output", EIGHT_BITS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_last_step_exceed_the_bound(fault: str, output: str) -> None:
    largest = dtype_named(output).max
    saturating = fault in ("O does not saturate", "maximum of another format")
    scale = float(torch.tensor(largest * (4.0 if saturating else 0.1)))
    # P in 8 bits loses as much as truncation does: `gather` convicts that kernel.
    eight = WIDE if fault == "O truncated" else PROMOTED
    for kernel, dtype in ((eight, "float8_e4m3fn"), (HALVES, "bfloat16")):
        problem = Problem.parse(f"sq=33,skv=70,d=32,dtype={dtype},out={output},seed=4").but(
            output_scale=scale
        )
        assert worst(problem, kernel) < 1
        assert worst(problem, kernel.but(fault=fault)) > 1


@pytest.mark.parametrize("output", EIGHT_BITS)
def test_every_neighbour_of_the_rounded_number_exceeds_an_exact_bound(output: str) -> None:
    """All finite numbers of the format and values between them: the nearest is inside, whatever is
    farther than half a unit in the last place is outside."""
    form, scale = dtype_named(output), 3.0
    every = torch.arange(256, dtype=torch.uint8).view(form.torch).double()
    grid = every[every.isfinite()].unique()
    between = torch.cat([grid[:-1] * (1 - t) + grid[1:] * t for t in (0.0, 0.25, 0.75)])
    wanted = between.abs() / scale
    feature = ScaledOutput(output, scale)
    want = stored(wanted, feature)
    bound = stored_bound(wanted, torch.zeros_like(wanted), feature)
    off = (grid[:, None] - want).abs()
    assert bool((off.amin(0) <= bound).all())
    steps = torch.exp2(torch.frexp(want.clamp(min=2.0**form.emin)).exponent - form.precision + 0.0)
    assert bool((bound < 0.501 * steps + form.smallest_subnormal / 100).all())


@pytest.mark.parametrize("output", EIGHT_BITS)
def test_what_saturates_is_exact_and_nothing_else_is_infinite(output: str) -> None:
    largest = dtype_named(output).max
    size = torch.tensor([0.5, 0.99, 1.5, 1e30], dtype=torch.float64) * largest
    feature = ScaledOutput(output, 1.0)
    assert stored(-size, feature).tolist()[2:] == [-largest] * 2
    bound = stored_bound(size, torch.full_like(size, 0.01), feature)
    assert bound[2:].tolist() == [0.0, 0.0]
    assert bool((bound[:2] > 0.01).all())
    unknown = stored_bound(size, torch.full_like(size, math.inf), feature)
    assert bool(unknown.isinf().all())
