"""An 8-bit P whose exponent holds its scale: what is subtracted is rounded twice, and P saturates
as much as that allows.

The bound and the rows' slack counted one rounding, so that `gluon-hopper-fp8-forward`, which writes
P as FlashAttention-3 does, was convicted on an H100: one key, e5m2, and scores of 1e8.
"""

from __future__ import annotations

import pytest

from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.meta.tolerance.test_tolerance import ratios, truth_of
from verify.judging.invariants import forward_slack, reach
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import Config

KERNEL = Kernel(
    "as FlashAttention-3 writes it",
    flat_numerics(
        scale_roundings=3, probability_scale=256.0, output_roundings=1, block_n=64, promotion=64
    ),
    style="fused",
)


# Seeds whose P saturates: in the first two by more than one rounding explains.
@pytest.mark.parametrize("seed", [4, 35, 0])
def test_the_bound_and_the_slack_of_a_row_hold_what_is_lost(seed: int) -> None:
    text = f"sq=64,skv=1,d=16,dtype=float8_e5m2,out=float16,dist=range_edges,seed={seed}"
    problem = Problem.parse(text)
    got = emulate(problem, KERNEL, Luck.NEAREST)
    truth = truth_of(problem, KERNEL.numerics, KERNEL.arch)
    assert ratios(problem, got, truth).worst <= 1
    q, k, v = (x.double() for x in dequantised(problem, tensors(problem)))
    arithmetic = resolve(KERNEL.numerics, Config(), problem, KERNEL.arch)
    slack = forward_slack(problem, arithmetic, reach(problem, q, k), (q, k, v))
    error = (got.out.double() - v).abs().amax(-1)
    rounding = 2.0**-11 * v.abs().amax(-1)
    allowed = slack.average * v.abs().amax(-1) + slack.absolute + rounding
    assert bool(((error <= allowed) | slack.beyond).all())


def test_what_saturates_without_cause_is_convicted() -> None:
    problem = Problem.parse("sq=64,skv=1,d=16,dtype=float8_e4m3fn,out=float16,dist=normal")
    got = emulate(problem, KERNEL.but(probability_scale=4096.0), Luck.NEAREST)
    assert ratios(problem, got, truth_of(problem, KERNEL.numerics, KERNEL.arch)).worst > 1
