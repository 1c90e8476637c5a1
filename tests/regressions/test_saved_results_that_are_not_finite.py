"""A saved O or LSE that is not finite makes NaN at masked pairs, where P is 0 and S is -inf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.reference_kernel import LOG2_E, Hand, tried_by
from tests.regressions.cases import SQUARE
from verify.judging.findings import first, place
from verify.judging.trial import Trial
from verify.oracles import (
    bound,
    causality,
)
from verify.problem import Problem

torch.set_num_threads(1)


INF, NAN = math.inf, math.nan


OVERFLOWING = Problem(**SQUARE, seed=3, distribution="large_logits", mask=Causal())


HALF_SCORES = flat_numerics(scores="input", exp="exp2f")


@dataclass(frozen=True)
class Unguarded(Hand):
    """Scores in fp16, and a backward that masks S alone.  plant: what becomes of its gradients."""

    plant: tuple[str, tuple[int, ...], float] | None = None

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).half().float()

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = self._loaded(p, given)
        seen, dtype, dout = (
            p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv),
            p.format.torch,
            given["dout"].float(),
        )
        scores = (q @ k.mT * (p.scale * LOG2_E)).masked_fill(~seen, -INF)
        weights = torch.exp2(scores - (given["lse"] * LOG2_E)[..., None])
        delta = (dout * given["out"].float()).sum(-1, keepdim=True)
        ds = (weights * (dout @ v.mT - delta)).to(dtype).float()
        by_head = p.batch, p.heads_kv, p.group, p.seqlen_kv
        dk, dv = ds.mT @ q * p.scale, weights.to(dtype).float().mT @ dout
        dk, dv = (x.view(*by_head, x.shape[-1]).sum(2) for x in (dk, dv))
        found = {"dq": (ds @ k * p.scale).to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
        if self.plant is not None:
            name, at, value = self.plant
            found[name][at] = value
        return found


def backward(plant: tuple[str, tuple[int, ...], float] | None = None, **changes: object) -> Trial:
    return tried_by(
        Unguarded(plant=plant), OVERFLOWING.but(**changes), "backward", numerics=HALF_SCORES
    )


def test_a_saved_result_that_is_not_finite_may_spread_to_hidden_keys() -> None:
    hidden = 0
    for seed in range(6):
        trial = backward(seed=seed)
        assert bool((~trial.saved.outputs["out"].isfinite()).any())
        for oracle in (bound.BACKWARD, causality.BACKWARD):
            assert acquitted(oracle.judge(trial))
        # the only row that sees that key
        last = trial.saved.outputs["lse"][:, :, -1].isfinite().unflatten(1, (2, 2)).all(2)
        hidden += int((trial.first.outputs["dk"][:, :, -1].isnan().any(-1) & last).sum())
    assert hidden


@pytest.mark.parametrize(("name", "value"), [("dq", NAN), ("dk", NAN), ("dv", 1e4)])
def test_what_no_such_row_reaches_is_asked_all_the_same(name: str, value: float) -> None:
    few = {"batch": 8, "seqlen_q": 2, "seqlen_kv": 2}
    planted = 0
    for seed in range(4):
        asked_for = getattr(backward(seed=seed, **few).gradients, f"{name}_bound").isfinite()
        assert not bool(asked_for.all())
        if bool(asked_for.any()):
            at = first(asked_for)
            convicted(
                bound.judge_backward(backward((name, at, value), seed=seed, **few)), place(name, at)
            )
            planted += 1
    assert planted


@pytest.mark.parametrize("value", [NAN, 1.0])
def test_finite_rows_spread_nothing(value: float) -> None:
    """Key 23 is hidden from all rows but the last."""
    for name in ("dk", "dv"):
        trial = backward((name, (0, 0, 23, 0), value), distribution="normal")
        assert bool(trial.saved.outputs["out"].isfinite().all())
        convicted(bound.judge_backward(trial), f"{name}[b=0, h=0, k=23, d=0]")
