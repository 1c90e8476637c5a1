"""Maxima that may lag: rows of a tile decide together when to catch up, so causality and poison
ask for bounds, not for bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Window
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import declared
from tests.harness.in_process import trial as asked
from tests.harness.reference_kernel import LOG2_E, Hand, tried_by
from tests.regressions.cases import SHAPE
from verify.judging.findings import Ruling
from verify.oracles import (
    Oracle,
    bound,
    causality,
    poison,
)
from verify.problem import Problem

torch.set_num_threads(1)


LAGGING = Problem(**(SHAPE | {"dtype": "float32"}), seed=4, mask=Causal(), softmax_scale=1.0)


Forward = Callable[[Problem, Mapping[str, Tensor]], dict[str, Tensor]]


def voting(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Blocks of 16 keys; all rows of a head take the new maximum when one of them is more than 8
    log2 units behind."""
    q, k, v = (given[name].repeat_interleave(p.group if name in "kv" else 1, 1) for name in "qkv")
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    top, total, acc = (
        torch.full(p.shape_q[:3], -math.inf),
        torch.zeros(p.shape_q[:3]),
        torch.zeros(p.shape_out),
    )
    for start in range(0, p.seqlen_kv, 16):
        part = slice(start, start + 16)
        s = (q @ k[:, :, part].mT * (p.scale * LOG2_E)).masked_fill(~seen[..., part], -math.inf)
        new, before = torch.maximum(top, s.amax(-1)), top
        top = torch.where((top == -math.inf) | (new - top > 8).any(-1, keepdim=True), new, top)
        base = top.clamp(min=torch.finfo(torch.float32).min)
        weights, shrink = torch.exp2(s - base[..., None]), torch.exp2(before - base)
        total, acc = (
            total * shrink + weights.sum(-1),
            acc * shrink[..., None] + weights @ v[:, :, part],
        )
    return {
        "out": (acc / total[..., None]).to(p.format_out.torch),
        "lse": (top + total.log2()) * math.log(2),
    }


def nudged(by: float) -> Forward:
    """A right forward, but that every launch after the first multiplies one number by 1 + by."""
    factors = itertools.chain([1.0], itertools.repeat(1 + by))

    def forward(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = Hand().forward(p, given)
        found["out"][0, 0, 0, 0] *= next(factors)
        return found

    return forward


def relation(oracle: Oracle, forward: Forward, lag: float, case: Problem = LAGGING) -> Ruling:
    """What causality or poison says of a forward that declares that lag, and promises its bits."""
    trial = asked(
        forward, case, declared(numerics=flat_numerics(exp="exp2f", block_n=16, maximum_lag=lag))
    )
    assert acquitted(bound.judge(trial))
    assert oracle.concerns(trial)
    return oracle.judge(trial)


@pytest.mark.parametrize("oracle", [causality.FORWARD, poison.FORWARD], ids=["causality", "poison"])
def test_rows_that_vote_on_a_rescale_are_held_to_their_bounds(oracle: Oracle) -> None:
    rulings = [
        relation(oracle, voting, lag, LAGGING.but(seed=seed))
        for lag in (0.0, 8.0)
        for seed in (4, 5)
    ]
    assert not all(map(acquitted, rulings[:2])), "the scores of one row reach the bits of another"
    assert all(map(acquitted, rulings[2:]))
    assert acquitted(relation(oracle, nudged(2.0**-23), 8.0))
    convicted(relation(oracle, nudged(2.0**-23), 0.0), "; 1 of")
    convicted(relation(oracle, nudged(1e-3), 8.0), "out[b=0, h=0, q=0, d=0]")


@dataclass(frozen=True)
class Voting(Hand):
    """A forward whose rows vote.  factors: what dQ of the first rows is multiplied by, launch by
    launch."""

    factors: Iterator[float] = field(default_factory=lambda: itertools.repeat(1.0))

    def forward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return voting(p, given)

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().backward(p, given)
        found["dq"][:, :, 0] *= next(self.factors)
        return found


def test_gradients_of_rows_that_vote_on_a_rescale_are_held_to_their_bounds() -> None:
    def ruling(seed: int, lag: float, *factors: float) -> Ruling:
        numerics = flat_numerics(exp="exp2f", block_n=16, maximum_lag=lag)
        hand = Voting(factors=itertools.chain(factors, itertools.repeat(1.0)))
        trial = tried_by(
            hand, LAGGING.but(seed=seed, mask=Window(30, 0)), "backward", numerics=numerics
        )
        assert acquitted(bound.judge_backward(trial))
        return causality.judge_backward(trial)

    assert not all(acquitted(ruling(seed, 0.0)) for seed in range(4, 14)), (
        "the scores of one row reach the bits of another"
    )
    assert all(acquitted(ruling(seed, 8.0)) for seed in range(4, 14))
    convicted(ruling(7, 8.0, 1.0, 1.0, 1.001), "changed: dq is off by")
    convicted(ruling(7, 8.0, 1.0, 1 + 2.0**-20), "from row", "dq should keep its bits")
