"""Maxima that are only upper bounds of a row's own: how far above it they may lie, where rows of a
tile share one.

The derivation is docs/tolerance.md, *Leading maximum*.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.row_blocks import row_blocks
from verify.problem import Problem
from verify.tolerance.arithmetic import ForwardArithmetic
from verify.tolerance.forward import overflows
from verify.tolerance.score_errors import largest_score_errors
from verify.tolerance.scratch import room_on

_FAR = 1e9  # natural units: nothing is left of any P


def shared_excess(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    a: ForwardArithmetic,
    rows: Tensor | None = None,
) -> Tensor | None:
    """How far the maximum that a tile shares, as computed, may lie above the exact one of each row.

    q, k: at their full logical shapes, descales applied.  rows: positions in seqlen_q; None: all.
    Returns fp64 (batch * heads_q, rows) in natural units, on the inputs' device; None where each
    row has its own maximum.
    """
    size = a.maximum_rows
    if size == 1:
        return None
    chosen = torch.arange(problem.seqlen_q) if rows is None else rows.cpu()
    tiles, tile = torch.unique(chosen // size, return_inverse=True)
    every = (tiles[:, None] * size + torch.arange(size)).flatten()
    inside = every < problem.seqlen_q
    # What a row of a tile beyond the last row sees is 0, the product of a query of zeros.
    beyond = 0.0 if bool((~inside).any()) else -torch.inf
    asked = every[inside]
    largest = q.new_full(
        (problem.batch * problem.heads_q, len(every)), -torch.inf, dtype=torch.float64
    )
    largest[:, ~inside] = beyond
    own = torch.full_like(largest, -torch.inf)
    at = inside.nonzero().flatten()
    for block in row_blocks(q, k, k[..., :1], problem.attention, rows=asked):
        heads, part = block.index
        room = room_on(block.scores.device)
        errors = largest_score_errors(block, a, problem, room)[..., 0]
        own[heads, at[part]] = block.row_max
        lost = overflows(block, a, problem)[..., 0]  # such a row takes its tile along
        tops = (block.row_max + errors).masked_fill(lost, torch.inf)
        largest[heads, at[part]] = tops
    tops = largest.view(len(largest), len(tiles), size).amax(-1)[:, tile]
    mine = own[:, torch.searchsorted(every, chosen)]
    excess = (tops - mine).clamp(min=0.0)
    return torch.where(mine == -torch.inf, 0.0, excess).nan_to_num(nan=_FAR, posinf=_FAR)


def whole_tiles(touched: Tensor, size: int) -> Tensor:
    """Rows of a tile in which some row is touched, both (batch, heads_q, seqlen_q) of booleans."""
    rows = touched.shape[-1]
    if size == 1 or not rows:
        return touched
    padded = torch.nn.functional.pad(touched, (0, -rows % size))
    tiles: Tensor = padded.view(*padded.shape[:-1], -1, size).any(-1)
    return tiles.repeat_interleave(size, -1)[..., :rows]
