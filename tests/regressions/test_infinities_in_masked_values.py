"""Infinities are planted only where the contract lets masked values be anything."""

from __future__ import annotations

import torch

from references.masks import Causal
from tests.harness.fake_trials import acquitted, tried
from tests.harness.reference_kernel import faulty, tried_by
from tests.regressions.cases import SHAPE
from verify.oracles import (
    poison,
)
from verify.problem import Problem
from verify.variant import Contract

torch.set_num_threads(1)


def test_infinities_are_planted_where_masked_values_may_be_anything() -> None:
    """A kernel that takes NaN alone out of V, and one that takes out all that is not finite."""
    contract = Contract(masked_values="any", nan="any")
    only_nan = faulty(load=lambda name, x: torch.where(x.isnan(), 0.0, x) if name == "v" else x)
    finite = faulty(load=lambda name, x: torch.where(x.isfinite(), x, 0.0) if name == "v" else x)
    for seed in range(8):
        case = Problem(**SHAPE, seed=seed, mask=Causal())
        assert acquitted(poison.judge(tried_by(finite, case, contract=contract)))
        ruling = poison.judge(tried_by(only_nan, case, contract=contract))
        assert bool(ruling.finding) is bool(seed & 2), seed
        assert bool(
            poison.poisoned(tried(case, contract=Contract(masked_values="finite")))
            .inputs.v.isfinite()
            .all()
        )
    eight = poison.poisoned(
        tried(case.but(dtype="float8_e4m3fn", seed=2), contract=contract)
    ).inputs
    assert bool(eight.v.double().isnan().any()), "a format without infinities"
