"""What each row sees: intervals of keys, rows without any, and the range of V, at any length."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from references.masks import Full
from verify.problem import Problem

_FEW_PAIRS = 1 << 24  # whose mask may be written out


@cache
def intervals(p: Problem) -> tuple[Tensor, Tensor] | None:
    """Visible keys [low, high) of every row, int64 (batch, seqlen_q); None where rows see no single
    interval."""
    try:
        low, high = p.mask.row_bounds(p.batch, p.seqlen_q, p.seqlen_kv)
    except ValueError:
        return None
    return low.long(), high.long()


def measurable(p: Problem) -> bool:
    """Whether the rows without a key are known at a bearable price."""
    return p.pairs <= _FEW_PAIRS or intervals(p) is not None


def live_rows(p: Problem) -> Tensor:
    """Rows that see a key, bool (batch, heads_q, seqlen_q)."""
    found = intervals(p)
    if found is None:
        return p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv).any(-1)
    return (found[1] > found[0])[:, None].expand(p.batch, p.heads_q, p.seqlen_q)


def visible_range(p: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest V that each row sees, fp64 (batch, heads_kv, seqlen_q or 1, head_dim_v);
    at least one key.

    Where rows see no single interval: of the keys that some row sees.  An empty row's are of no
    meaning.
    """
    found = intervals(p)
    if v.dtype != torch.float64:
        v = v.float()  # of formats that fp32 holds: half the memory
    if isinstance(p.mask, Full):
        return v.amin(2, keepdim=True).double(), v.amax(2, keepdim=True).double()
    if found is None:
        seen = (
            p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
            .any(2)
            .view(p.batch, p.heads_kv, p.group, -1)
            .any(2)
        )
        hidden = ~seen[..., None]
        least = v.masked_fill(hidden, math.inf).amin(2, keepdim=True)
        most = v.masked_fill(hidden, -math.inf).amax(2, keepdim=True)
        return least.double(), most.double()
    low, high = found
    least, most = (v.new_zeros(p.batch, p.heads_kv, p.seqlen_q, p.head_dim_v) for _ in range(2))
    # Of 2^level keys from every key on; an interval is covered by two of them.
    level, below, above = 0, v, v
    levels = torch.log2((high - low).clamp(min=1).double()).floor().long()
    top = int(levels.max()) if levels.numel() else -1
    while level <= top:
        for b in range(p.batch):
            rows = (levels[b] == level).nonzero()[:, 0]
            if len(rows):
                first = low[b, rows].clamp(max=below.shape[2] - 1)
                last = torch.maximum(high[b, rows] - (1 << level), first)
                least[b, :, rows] = torch.minimum(below[b, :, first], below[b, :, last])
                most[b, :, rows] = torch.maximum(above[b, :, first], above[b, :, last])
        step = 1 << level
        below = torch.minimum(below[:, :, :-step], below[:, :, step:])
        above = torch.maximum(above[:, :, :-step], above[:, :, step:])
        level += 1
    return least.double(), most.double()
