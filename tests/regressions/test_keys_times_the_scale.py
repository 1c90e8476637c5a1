"""torch's blocked backward on a CPU gives the scale to its products, which multiply K, Q or dS by
it: these overflow, or lose bits below the normal range, where the results do neither."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kernels.torch import cpu_flash_backward
from tests.harness.property_cases import bench
from verify.problem import Problem

# S is below 2^117, and some keys times the scale are above 2^128.  33 rows: the last one is a block
# of its own, for which sgemm multiplies float16.
LARGE = Problem.parse("sq=33,skv=33,d=16,dtype=float16,scale=8.507059173023462e+37,dist=increasing")
# dS is at most 2^-9, and times the scale it is subnormal; dK is about 2^-80.
SMALL = Problem.parse(
    "b=4,hq=5,hkv=5,sq=1,skv=228,d=8,dtype=float32,mask=dense.99.118,scale=1.1754943508222875e-38,"
    "dist=increasing,seed=418282"
)
CASES = {
    "torch-cpu-flash-backward-float16-causal": LARGE,
    "torch-cpu-flash-backward-bfloat16-causal": LARGE.but(dtype="bfloat16"),
    "torch-cpu-flash-backward-float32": SMALL,
}


@pytest.mark.parametrize("variant", CASES)
def test_a_scale_inside_the_products(variant: str, tmp_path: Path) -> None:
    with bench(cpu_flash_backward.__file__, tmp_path) as judge:
        problem = CASES[variant]
        found = judge.verdict(variant, "gradients", "gradient_bound", problem)
        assert found.outcome == "pass", found.finding
        ordinary = problem.but(softmax_scale=0.25)
        found = judge.verdict(variant, "gradients", "gradient_bound", ordinary)
        assert found.outcome == "pass", found.finding
        for name in ("dq", "dk", "dv"):
            assert math.isfinite(found.measures[f"worst_bound_{name}"])
