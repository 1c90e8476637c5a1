"""A problem inside a narrow support, and tensors that lie as a problem says."""

from __future__ import annotations

import torch

from verify.problem import Problem
from verify.variant import (
    AttentionArgs,
    Config,
    Support,
)

NARROW = Support(
    dtypes=("float16",),
    head_dims=(64, 128),
    masks=("full", "causal"),
    min_seqlen=2,
    max_seqlen=100,
    scales="default",
)
INSIDE = Problem(
    batch=2, heads_q=2, heads_kv=2, seqlen_q=8, seqlen_kv=9, head_dim=64, dtype="float16"
)


# Support.check, on tensors.


def arguments(problem: Problem) -> tuple[AttentionArgs, torch.Tensor]:
    """Tensors that lie as the problem says, in allocations that begin at a multiple of 512
    bytes."""

    def tensor(name: str) -> torch.Tensor:
        layout, shape = problem.layouts[name], problem.shapes[name]
        size = max(layout.extent(shape), 1) + layout.pitch
        whole = torch.zeros(size + 256, dtype=problem.format.torch)
        skip = -whole.data_ptr() % 512 // whole.itemsize
        return whole.as_strided(shape, layout.strides(shape), skip + layout.offset)

    q, k, v, out = (tensor(name) for name in ("q", "k", "v", "out"))
    return AttentionArgs(q, k, v, problem.mask, problem.scale, problem.score_mod, Config()), out
