"""Attention as eager code computes it: scores and weights in the inputs' format, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.harness.declared import flat_numerics
from tests.harness.in_process import declared
from tests.harness.in_process import trial as asked
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.variant import Contract

EAGER = flat_numerics(scores="input", normalised=True, exp="vexp", block_n=0)


@dataclass(frozen=True)
class Eager:
    """softmax(round(round(Q K^T) scale) + mask) V.

    hidden: the value of masked scores.  added: add `hidden` to them instead of replacing them.
    """

    hidden: float = -65504.0
    added: bool = False
    product: torch.dtype = torch.float32
    flush: float = 0.0

    def __call__(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (given[name].expand(getattr(p, f"shape_{name}")).float() for name in "qkv")
        k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
        masked, dtype = ~p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv), p.format.torch
        s = ((q @ k.mT).to(dtype).float() * p.scale).to(dtype)
        s = (
            s + masked.to(dtype).masked_fill(masked, self.hidden)
            if self.added
            else s.masked_fill(masked, self.hidden)
        )
        weights = torch.exp(s.float() - s.float().amax(-1, keepdim=True))
        if self.product != torch.float32:  # un-normalised sums of 16 keys, stored in 16 bits
            parts = zip(weights.to(dtype).float().split(16, -1), v.split(16, 2), strict=True)
            out = sum((w @ x).to(self.product).float() for w, x in parts) / weights.sum(
                -1, keepdim=True
            )
        else:
            out = (weights / weights.sum(-1, keepdim=True)).to(dtype).float() @ v
        return {
            "out": torch.where(out.abs() < self.flush, 0.0, out).to(dtype),
            "lse": torch.zeros(p.shape_q[:3]),
        }


def eager(kernel: Eager, problem: Problem, **changes: object) -> Trial:
    declaration = replace(declared(Contract(lse=None, nan="any"), EAGER, score_mods=()), **changes)
    return asked(kernel, problem, declaration)
