"""No oracle convicts a fused exponent that overflows: where bounds are infinite nothing follows
from a result, be it NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.declared import flat_gradients
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.reference_kernel import LOG2_E, Hand, tried_by
from verify.judging.trial import Trial
from verify.oracles import (
    bound,
    causality,
    convexity,
    duplicated_keys,
    empty_rows,
    gradient_sums,
    key_permutation,
    linearity,
    poison,
    power_of_two,
    slice,
    split_merge,
)
from verify.oracles.poison import poisoned
from verify.problem import Problem
from verify.problem.known_answers import gather_possible
from verify.problem.strategies import EXTREME_SCALES
from verify.statistics.rows import unsuited

torch.set_num_threads(1)

CASE = Problem(
    batch=2,
    heads_q=2,
    heads_kv=1,
    seqlen_q=10,
    seqlen_kv=24,
    head_dim=16,
    dtype="float16",
    softmax_scale=1e9,
    seed=6,
)
NUMERICS = flat_gradients(block_m=0, block_n=0)
FORWARD = (
    bound.FORWARD,
    convexity.ORACLE,
    poison.FORWARD,
    causality.FORWARD,
    split_merge.ORACLE,
    key_permutation.FORWARD,
    duplicated_keys.ORACLE,
    linearity.FORWARD,
    slice.FORWARD,
    power_of_two.FORWARD,
)
BACKWARD = (bound.BACKWARD, gradient_sums.ORACLE, causality.BACKWARD)


@dataclass(frozen=True)
class Fused(Hand):
    """One fma per exponent, and an additive mask.  wrong: V of another key."""

    wrong: bool = False

    def _exponents(
        self, p: Problem, given: Mapping[str, Tensor], shift: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """P before it is rounded, its maximum and V."""
        q, k, v = self._loaded(p, given)
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        raw = q @ k.mT + torch.zeros(()).masked_fill(~seen, -math.inf)
        sigma = torch.tensor(p.scale) * torch.tensor(LOG2_E)
        top = raw.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, 0.0, top)
        shift = top * sigma if shift is None else shift
        y = (raw.double() * sigma.double() - shift.double()).float()
        return torch.exp2(y).masked_fill(~seen, 0.0), top, v.roll(1, 2) if self.wrong else v

    def forward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, top, v = self._exponents(p, given, None)
        total = weights.sum(-1, keepdim=True)
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv).any(-1)
        out = weights.half().float() @ v / total
        lse = (top * torch.tensor(p.scale) + total.log())[..., 0]
        out = torch.where(seen[..., None], out, 0.0)
        return {"out": out.to(p.format.torch), "lse": torch.where(seen, lse, -math.inf)}

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shift = torch.where(given["lse"] == -math.inf, 0.0, given["lse"] * torch.tensor(LOG2_E))[
            ..., None
        ]
        weights, _, v = self._exponents(p, given, shift)
        q, k, _ = self._loaded(p, given)
        dtype, dout = p.format.torch, given["dout"].float()
        delta = (dout * given["out"].float()).sum(-1, keepdim=True)
        ds = (weights * (dout @ v.mT - delta)).to(dtype).float()
        shape = p.batch, p.heads_kv, p.group, p.seqlen_kv
        dk, dv = ds.mT @ q * p.scale, weights.to(dtype).float().mT @ dout
        dk, dv = (x.view(*shape, x.shape[-1]).sum(2) for x in (dk, dv))
        return {"dq": (ds @ k * p.scale).to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}


def tried(problem: Problem, entry: str = "forward", **changes: object) -> Trial:
    return tried_by(Fused(**changes), problem, entry, gradients=NUMERICS)


@pytest.mark.parametrize("oracle", FORWARD, ids=lambda oracle: oracle.name)
def test_no_forward_oracle_convicts(oracle) -> None:
    asked = 0
    for problem in (
        CASE,
        CASE.but(mask=Causal(), dtype="float32", softmax_scale=1e10),
        CASE.but(distribution="range_edges"),
    ):
        for seed in range(3):
            trial = tried(problem.but(seed=seed))
            if oracle.concerns(trial) and not (
                oracle is poison.FORWARD and problem.mask != Causal()
            ):
                asked += 1
                assert acquitted(oracle.judge(trial)), trial.problem.name
    assert asked or oracle is power_of_two.FORWARD
    assert not bool(tried(CASE).first.outputs["out"].isfinite().all())


@pytest.mark.parametrize("oracle", BACKWARD, ids=lambda oracle: oracle.name)
def test_no_backward_oracle_convicts(oracle) -> None:
    for problem in (
        CASE,
        CASE.but(softmax_scale=1e7),
        CASE.but(distribution="range_edges", softmax_scale=1.0),
    ):
        for seed in range(3):
            trial = tried(problem.but(seed=seed), "backward")
            if oracle.concerns(trial):
                assert acquitted(oracle.judge(trial)), trial.problem.name


def test_a_wrong_kernel_is_convicted_under_a_huge_scale() -> None:
    convicted(bound.judge(tried(CASE.but(softmax_scale=1e6), wrong=True)))
    convicted(bound.judge_backward(tried(CASE.but(softmax_scale=1e3), "backward", wrong=True)))


def test_a_poisoned_key_overflows_no_score() -> None:
    """A masked score of infinity may make NaN of its row; under ordinary scales the key is as large
    as ever."""
    masked = CASE.but(mask=Causal(), dtype="bfloat16")
    for arch in ("cpu", "sm_90"):
        for scale, largest in ((0.25, 2.0**14), (2.0**118, 64.0), (2.0**126, 8.0)):
            trial = tried(masked.but(softmax_scale=scale))
            trial.arch = arch
            keys = float(poisoned(trial).inputs.k.double().abs().max())
            assert keys == largest if scale < 1 else keys <= largest


def test_gather_is_built_where_its_winners_weigh_one() -> None:
    case = CASE.but(distribution="gather", dtype="float16", softmax_scale=None)
    assert gather_possible(case) is None
    assert gather_possible(case.but(dtype="bfloat16", softmax_scale=2.0**100)) is None
    assert "so large" in (gather_possible(case.but(softmax_scale=1e9)) or "")


def test_statistics_leave_extreme_scales_out() -> None:
    for scale in EXTREME_SCALES:
        reason = unsuited(CASE.but(softmax_scale=scale))
        assert (reason is None) is (2.0**-40 <= scale <= 2.0**40)


def test_an_empty_row_behind_scores_that_overflow_may_be_nan() -> None:
    problem = Problem(
        seqlen_q=3,
        seqlen_kv=2,
        head_dim=16,
        dtype="bfloat16",
        mask=Causal(),
        softmax_scale=2.0**126,
        seed=1,
    )
    trial = tried(problem.but(distribution="v_mean"))
    assert bool(trial.truth.empty.any())
    trial.first.outputs["out"][0, 0, 0] = math.nan
    assert acquitted(empty_rows.judge(trial))
    plain = tried(problem.but(softmax_scale=0.25))
    plain.first.outputs["out"][0, 0, 0] = math.nan
    convicted(empty_rows.judge(plain), "without a visible key")
