"""What a backward reads, its saved results in fp64, and its gradients without blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.attention import forward as reference
from references.score_mods import cap_of
from tests.harness.drawn_inputs import drawn, drawn_dout
from tests.harness.emulation import Result
from verify.problem import Problem
from verify.problem.inputs import dout as upstream
from verify.problem.inputs import tensors


@dataclass(frozen=True)
class Inputs:
    """q, k, v and dout at their full shapes, in the problem's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def of(problem: Problem, device: str = "cpu") -> Inputs:
        """Those of the problem's distribution, made on that device with the same bits on each."""
        on_cpu = device == "cpu"
        made = drawn(problem) if on_cpu else tensors(problem, device)
        return Inputs(
            made.q.expand(problem.shape_q),
            made.k.expand(problem.shape_k),
            made.v.expand(problem.shape_v),
            drawn_dout(problem) if on_cpu else upstream(problem, device),
        )

    def to(self, device: str) -> Inputs:
        """The same on another device."""
        return Inputs(*(x.to(device) for x in (self.q, self.k, self.v, self.dout)))


def exact(problem: Problem, given: Inputs) -> Result:
    """O and LSE in fp64."""
    made = reference(given.q, given.k, given.v, problem.attention)
    return Result(made.out, made.lse)


def nominal(
    problem: Problem, given: Inputs, saved: Result, of_weights: bool = False
) -> dict[str, Tensor]:
    """dq, dk and dv from the saved results, in fp64 and without blocks.

    of_weights: D is the sum of P dP, and O is not read.
    """
    q, dout, group = given.q.double(), given.dout.double(), problem.group
    k, v = (x.double().repeat_interleave(group, 1) for x in (given.k, given.v))
    visible = problem.mask.dense(
        problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv
    )
    empty = ~visible.any(-1, keepdim=True)
    lse = saved.lse.double()[..., None].masked_fill(empty, 0.0)
    scores, slope = problem.scale * (q @ k.mT), 1.0
    cap = cap_of(problem.score_mod)
    if cap:
        tangent = torch.tanh(scores / cap)
        scores, slope = cap * tangent, 1 - tangent * tangent
    p = torch.exp((scores - lse).masked_fill(~visible, -math.inf))
    dp = dout @ v.mT
    if of_weights:
        delta = (p * dp).sum(-1, keepdim=True)
    else:
        delta = (dout * saved.out.double().masked_fill(empty, 0.0)).sum(-1, keepdim=True)
    ds = p * (dp - delta) * slope
    dk, dv = (
        (weights.mT @ x).unflatten(1, (-1, group)).sum(2)
        for weights, x in ((problem.scale * ds, q), (p, dout))
    )
    return {"dq": problem.scale * ds @ k, "dk": dk, "dv": dv}
