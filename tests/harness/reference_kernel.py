"""A reference kernel, forward and backward, in the arithmetic of `fake_trials.DECLARED`, in which a
test can plant a fault.

It has FlashAttention-2's algorithms on the CPU: blocks of 32 keys, fp32 except for P and dS.
`tried_by` makes trials that launch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.harness.declared import flat_gradients
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem import Problem

LOG2_E = math.log2(math.e)
BLOCK = 32


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Hand:
    """The kernel; each field is a place for a fault.

    scores: applied to the accumulator of Q K^T after every 16 products.  product: dtype of the
    accumulator of P V.  load: applied to q, k and v.  exp2: the exponential.  finish: applied to O
    before it is rounded; store: rounds it.  rescale: whether the accumulator is rescaled.  delta:
    applied to delta; dscores: applied to dS before it is rounded.
    """

    scores: Callable[[Tensor], Tensor] = same
    product: torch.dtype = torch.float32
    load: Callable[[str, Tensor], Tensor] = lambda name, x: x
    exp2: Callable[[Tensor], Tensor] = torch.exp2
    finish: Callable[[Tensor], Tensor] = same
    store: Callable[[Tensor, torch.dtype], Tensor] = lambda x, dtype: x.to(dtype)
    rescale: bool = True
    delta: Callable[[Tensor], Tensor] = same
    dscores: Callable[[Tensor], Tensor] = same

    def forward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """out and the natural lse."""
        q, k, v = self._loaded(p, given)
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        top = torch.full(p.shape_q[:3], -math.inf)
        total, acc = torch.zeros(p.shape_q[:3]), torch.zeros(p.shape_out)
        for start in range(0, p.seqlen_kv, BLOCK):
            part = slice(start, start + BLOCK)
            x = (self._scores(q, k[:, :, part]) * _factor(p)).masked_fill(
                ~seen[..., part], -math.inf
            )
            new = torch.maximum(top, x.amax(-1))
            shift = torch.where(new == -math.inf, 0.0, new)
            weights, old = self.exp2(x - shift[..., None]), self.exp2(top - shift)
            total = total * old + weights.sum(-1)
            acc = acc * old[..., None] if self.rescale else acc
            acc = (
                (acc + weights.to(p.format.torch).float() @ v[:, :, part]).to(self.product).float()
            )
            top = new
        live = total > 0
        denominator = torch.where(live, total, 1.0)
        out = self.store(self.finish(acc / denominator[..., None]), p.format_out.torch)
        return {"out": out, "lse": math.log(2) * (top + torch.log2(denominator))}

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """dq, dk and dv from the saved out and lse in `given`."""
        q, k, v = self._loaded(p, given)
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        dtype, dout = p.format.torch, given["dout"].float()
        shift = torch.where(given["lse"] == -math.inf, 0.0, given["lse"] * LOG2_E)[..., None]
        weights = self.exp2(self._scores(q, k) * _factor(p) - shift).masked_fill(~seen, 0.0)
        delta = self.delta((dout * given["out"].float()).sum(-1, keepdim=True))
        ds = (
            self.dscores((weights * (dout @ v.mT - delta)).masked_fill(~seen, 0.0))
            .to(dtype)
            .float()
        )
        by_head = p.batch, p.heads_kv, p.group
        dk, dv = ds.mT @ q * p.scale, weights.to(dtype).float().mT @ dout
        dk, dv = (x.view(*by_head, *x.shape[2:]).sum(2) for x in (dk, dv))
        return {"dq": (ds @ k * p.scale).to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}

    def _loaded(self, p: Problem, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.load(name, given[name].float()) for name in "qkv")
        return q, k.repeat_interleave(p.group, 1), v.repeat_interleave(p.group, 1)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Q K^T, 16 elements of head_dim at a time."""
        acc = torch.zeros(*q.shape[:3], k.shape[2])
        for start in range(0, q.shape[-1], 16):
            acc = self.scores(acc + q[..., start : start + 16] @ k[..., start : start + 16].mT)
        return acc


def _factor(p: Problem) -> Tensor:
    return torch.tensor(p.scale * LOG2_E, dtype=torch.float32)


class Judge(Trial):
    """A trial that launches a `Hand`."""

    hand: Hand

    def _launch(self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]]) -> Launch:
        computed = self.hand.backward if entry == "backward" else self.hand.forward
        (inputs,) = given
        outputs = computed(self.problem, inputs)
        if self.declaration.contract.lse is None:
            outputs.pop("lse", None)
        return Launch(OK, poison, outputs)

    def beside(self, tag: str, problem: Problem, inputs=None, dout=None) -> Trial:
        other = super().beside(tag, problem, inputs, dout)
        other.hand = self.hand
        return other


def tried_by(hand: Hand, problem: Problem, entry: str = "forward", **changes: object) -> Trial:
    """The trial of a `Hand`."""
    plain = trial_of(problem, **({"gradients": flat_gradients(block_m=0, block_n=0)} | changes))
    judge = Judge(
        plain.declaration, plain.config, problem, plain.cell, plain.arena, plain.arch, entry=entry
    )
    judge.hand = hand
    return judge


def faulty(**changes: object) -> Hand:
    return replace(Hand(), **changes)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded toward zero."""
    near = x.to(dtype)
    toward = torch.nextafter(near.float(), torch.zeros(())) if dtype is torch.float32 else None
    if toward is not None:
        return torch.where(near.abs() > x.abs(), toward, near)
    bits = near.contiguous().view(torch.int16) - (near.float().abs() > x.abs()).to(torch.int16)
    return bits.view(dtype)
