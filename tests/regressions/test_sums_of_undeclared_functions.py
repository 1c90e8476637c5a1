"""A function that declares nothing may round its sums in fp16."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.harness.eager import Eager, eager
from tests.harness.fake_trials import acquitted
from tests.regressions.cases import SQUARE
from verify.oracles import (
    power_of_two,
)
from verify.problem import Problem

torch.set_num_threads(1)


def test_sums_of_an_undeclared_function_may_be_rounded_in_fp16() -> None:
    """A part of a sum may be subnormal where the whole is a normal number, so that bits do not
    scale."""
    cases = [
        Problem(**(SQUARE | {"seqlen_q": 1, "seqlen_kv": 111}), distribution="octaves", seed=seed)
        for seed in range(2, 40, 2)
    ]
    kernel = Eager(product=torch.float16)
    trials = [eager(kernel, case, undeclared=True) for case in cases]
    down = [
        t for t in trials if power_of_two.FORWARD.concerns(t) and power_of_two.powers(t).values < 0
    ]
    assert all(acquitted(power_of_two.judge(trial)) for trial in down)
    assert not all(acquitted(power_of_two.judge(eager(kernel, trial.problem))) for trial in down), (
        "declared fp32"
    )
    flushed = [eager(replace(kernel, flush=1e-3), trial.problem, undeclared=True) for trial in down]
    assert not any(acquitted(power_of_two.judge(trial)) for trial in flushed)
