"""Exponentials that all err in one direction are honest up to the declared error."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.reference_kernel import faulty, tried_by
from verify.evidence import Verdict
from verify.problem import Problem
from verify.statistics.gradients import gradient_measures
from verify.statistics.limits import MODEL
from verify.statistics.pool import Pool, pools

torch.set_num_threads(1)


POLYNOMIAL = 8.5e-5  # `exp2_poly3` declares 8.8e-5


SHAPE = "hq=2,sq=48,skv=64,d=16"


CASES = [
    f"{SHAPE},dist={name},seed={seed}"
    for seed, name in enumerate(("normal", "same_sign_v", "v_mean") * 16)
]  # 64 rows of each gradient in each


@cache
def pooled(dtype: str, error: float) -> dict[str, Pool]:
    """Pools of a backward whose exponentials are all that far off, but for exp(0), by tensor."""

    def exp2(x: Tensor) -> Tensor:
        return torch.where(x == 0, 1.0, torch.exp2(x) * (1 + error))

    heard = []
    for name in CASES:
        problem = Problem.parse(f"{name},dtype={dtype}")
        declared = {
            "gradients": flat_gradients(exp="exp2_poly3", block_m=0, block_n=0),
            "numerics": flat_numerics(exp="exp2_poly3"),
        }
        measures = gradient_measures(tried_by(faulty(exp2=exp2), problem, "backward", **declared))
        heard.append(
            Verdict(
                case=problem.name,
                variant="by hand",
                config="-",
                dtype=dtype,
                oracle="gradient_bound",
                group="gradients",
                outcome="pass",
                phase="generate",
                problem=problem.name,
                measures=measures,
            )
        )
    return {pool.tensor: pool for pool in pools(heard)}


@pytest.mark.parametrize("error", [POLYNOMIAL, -POLYNOMIAL])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exponentials_may_all_be_off_in_one_direction(dtype: str, error: float) -> None:
    for pool in pooled(dtype, error).values():
        assert abs(pool.toward) > 0.14, "what the declared error leads to"
        assert abs(pool.toward) < pool.slack + MODEL, "and no luck is needed"
        assert not list(pool.excesses)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exponentials_that_are_off_by_more_than_declared_fail(dtype: str) -> None:
    for pool in pooled(dtype, -4 * POLYNOMIAL).values():
        assert "toward" in [name for name, _, _ in pool.excesses]
