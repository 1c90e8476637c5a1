"""A subnormal product with the scale (a descale, or an operand in fp32) is rounded otherwise when a
power of two makes it normal: such powers are not asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from references.quantisation import parse_quantisation
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import SHAPE, tried
from verify.judging.power_scaling import powers
from verify.judging.trial import Trial
from verify.problem import Problem

torch.set_num_threads(1)

QUANTISED = Problem(
    **SHAPE,
    dtype="float8_e4m3fn",
    quantisation=parse_quantisation("tensor"),
    distribution="octaves",
)
SEEDS = range(12)


def factor(trial: Trial, keys: int) -> np.float32:
    """scale * log2(e) * descale_q * descale_k in fp32, one product after the other."""
    scale = np.float32(trial.problem.scale) * np.float32(math.log2(math.e))
    for name, power in (("q", keys), ("k", -keys)):
        scale = scale * np.float32(trial.inputs.others[f"descale_{name}"][0, 0] * 2.0**power)
    return np.float32(scale)


@pytest.mark.parametrize(("scale", "asked"), [(2.0**-126, False), (2.0**-60, True)])
def test_descales_are_scaled_where_no_product_with_the_scale_is_subnormal(
    scale: float, asked: bool
) -> None:
    trials = [
        tried(
            QUANTISED.but(softmax_scale=scale, seed=seed),
            numerics=flat_numerics(probability_scale=256.0, scale_roundings=3),
        )
        for seed in SEEDS
    ]
    assert any(powers(trial).keys for trial in trials) is asked
    for trial in trials:
        assert factor(trial, 0) == factor(trial, powers(trial).keys)
    moved = [factor(trial, 0) != factor(trial, 40) for trial in trials]
    assert any(moved) is not asked, "what an honest kernel's factor does"


@pytest.mark.parametrize("prescale", ["q", "sqrt"])
def test_operands_prescaled_in_fp32_stay_normal(prescale: str) -> None:
    plain = Problem(**SHAPE, dtype="float16", distribution="octaves")
    declared = flat_numerics(operands="float32", prescale=prescale)

    def keys(scale: float) -> list[int]:
        cases = [plain.but(softmax_scale=scale, seed=seed) for seed in SEEDS]
        return [powers(tried(case, numerics=declared)).keys for case in cases]

    assert any(keys(0.125))
    if prescale == "q":  # octaves lie at 1/4 and above
        assert all(key >= 0 for key in keys(2.0**-124))
