"""torch's blocked backward on a CPU multiplies K of float16 by the scale: S overflows in products
that are finite with the scale behind them."""

from __future__ import annotations

import math
from pathlib import Path

from kernels.torch import cpu_flash_backward
from tests.harness.property_cases import bench
from verify.problem import Problem

# 33 rows: the last one is a block of its own, which is multiplied by sgemm.  S is below 2^117, and
# some keys times the scale are above 2^128.
PROBLEM = Problem.parse(
    "sq=33,skv=33,d=16,dtype=float16,scale=8.507059173023462e+37,dist=increasing"
)
VARIANT = "torch-cpu-flash-backward-{}-causal"


def test_keys_that_overflow_excuse_a_row_and_others_nothing(tmp_path: Path) -> None:
    with bench(cpu_flash_backward.__file__, tmp_path) as judge:
        for dtype in ("float16", "bfloat16"):
            problem, variant = PROBLEM.but(dtype=dtype), VARIANT.format(dtype)
            found = judge.verdict(variant, "gradients", "gradient_bound", problem)
            assert found.outcome == "pass", found.finding
            ordinary = problem.but(softmax_scale=0.25)
            found = judge.verdict(variant, "gradients", "gradient_bound", ordinary)
            assert found.outcome == "pass", found.finding
            assert all(
                math.isfinite(found.measures[f"worst_bound_{n}"]) for n in ("dq", "dk", "dv")
            )
