"""Weights that are divided by a rounded LSE are counted with its error."""

from __future__ import annotations

import pytest
import torch

from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.oracles import (
    counting,
)
from verify.problem import Problem

torch.set_num_threads(1)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_divided_by_a_rounded_lse_are_counted_with_its_error(
    dtype: str, normalised: bool
) -> None:
    """P = exp(S - LSE) is 1 / n only as well as the LSE is rounded, and is itself rounded for its
    product."""
    numerics = flat_numerics(block_n=0, normaliser="lse", normalised=normalised, exp="vexp")
    for keys in range(60, 300, 7):
        case = Problem(
            seqlen_q=1, seqlen_kv=keys, head_dim=16, dtype=dtype, distribution="counting", seed=1
        )
        for doubled in (0, 1):
            trial = trial_of(case, numerics=numerics)
            scores = torch.zeros(1, 1, 1, keys + doubled)
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[..., None]).to(case.format.torch).float()
            values = trial.expanded[2].float()
            values = torch.cat([values, values[..., :doubled, :]], -2)
            out = (weights @ values).to(case.format.torch)
            trial.launches["first"] = Launch(OK, "nan", {"out": out, "lse": lse})
            assert (counting.judge(trial).finding is not None) == bool(doubled)
