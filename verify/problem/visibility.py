"""What each row sees: intervals of keys, rows without any, and the range of V, at any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from references.masks import Full, Mask
from verify.problem import Problem

_FEW_PAIRS = 1 << 24  # whose mask may be written out
_SEGMENT = 64  # keys in the mean: shorter segments cost more than they save


def intervals(p: Problem) -> tuple[Tensor, Tensor] | None:
    """Visible keys [low, high) of every row, int64 (batch, seqlen_q); None where rows see no single
    interval."""
    return _intervals(p.mask, p.batch, p.seqlen_q, p.seqlen_kv)


@lru_cache(maxsize=64)  # a case asks several times, and so do its siblings
def _intervals(
    mask: Mask, batch: int, seqlen_q: int, seqlen_kv: int
) -> tuple[Tensor, Tensor] | None:
    try:
        low, high = mask.row_bounds(batch, seqlen_q, seqlen_kv)
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


def cuts(p: Problem, low: Tensor, high: Tensor) -> Tensor:
    """Keys at which the intervals [low, high) of a problem begin or end, int64, ascending: every
    interval consists of whole segments between two of them.

    All keys, and their number, where segments would be short.
    """
    found = torch.unique(torch.cat((low.flatten(), high.flatten())))
    few = len(found) * _SEGMENT <= p.seqlen_kv
    return found if few else torch.arange(p.seqlen_kv + 1)


def by_segments(x: Tensor, at: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """K or V by the segments between neighbours of `at`: what `reduce` makes of each, of which
    dimension 2 has length 1; x itself if each segment is one key."""
    if len(at) == x.shape[2] + 1:
        return x
    ends = at.tolist()
    parts = [reduce(x[:, :, a:b]) for a, b in pairwise(ends)]
    return torch.cat(parts, 2) if parts else x[:, :, :0]


def visible_range(p: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest V that each row sees, fp64 or fp32, which holds them (batch, heads_kv,
    seqlen_q or 1, head_dim_v); at least one key.

    Where rows see no single interval: of the keys that some row sees.  An empty row's are of no
    meaning.
    """
    found = intervals(p)
    if isinstance(p.mask, Full):
        return _wide(v.amin(2, keepdim=True)), _wide(v.amax(2, keepdim=True))
    if found is None:
        v = _wide(v)
        seen = (
            p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
            .any(2)
            .view(p.batch, p.heads_kv, p.group, -1)
            .any(2)
        )
        hidden = ~seen[..., None]
        least = v.masked_fill(hidden, math.inf).amin(2, keepdim=True)
        most = v.masked_fill(hidden, -math.inf).amax(2, keepdim=True)
        return least, most
    at = cuts(p, *found)
    below = _wide(by_segments(v, at, lambda part: part.amin(2, keepdim=True)))
    above = _wide(by_segments(v, at, lambda part: part.amax(2, keepdim=True)))
    if not below.shape[2]:  # every row is empty
        empty = below.new_zeros(p.batch, p.heads_kv, p.seqlen_q, p.head_dim_v)
        return empty, empty
    low, high = (torch.searchsorted(at, x) for x in found)
    live = high > low
    begin = low[live].amin() if bool(live.any()) else low.new_zeros(())
    if bool((~live | (low == begin)).all()):
        last = (high - 1 - begin).clamp(min=0)
        running = (
            torch.from_numpy(kind.accumulate(x[:, :, begin:].numpy(), axis=2))
            for kind, x in ((np.minimum, below), (np.maximum, above))
        )
        return _taken(next(running), last), _taken(next(running), last)
    return _of_intervals(p, low, high, below, above)


def _wide(x: Tensor) -> Tensor:
    """In fp32 or fp64: of formats that fp32 holds, half the memory."""
    return x if x.dtype == torch.float64 else x.float()


def _taken(x: Tensor, at: Tensor) -> Tensor:
    """Rows of (batch, heads, n, dim) at (batch, rows)."""
    return torch.stack([own.index_select(1, rows) for own, rows in zip(x, at, strict=True)])


def _of_intervals(
    p: Problem, low: Tensor, high: Tensor, below: Tensor, above: Tensor
) -> tuple[Tensor, Tensor]:
    """Least of `below` and greatest of `above` in each interval, from tables of powers of two."""
    least, most = (below.new_zeros(p.batch, p.heads_kv, p.seqlen_q, p.head_dim_v) for _ in range(2))
    # Of 2^level keys from every key on; an interval is covered by two of them.
    level = 0
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
    return least, most
