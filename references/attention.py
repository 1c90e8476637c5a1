"""Attention and its gradients in double precision.

For one head, over the visible pairs alone:

    S = softmax_scale Q K^T,  with a score mod f:  S <- f(S)
    m_i = max_j S_ij        l_i = sum_j exp(S_ij - m_i)        LSE_i = m_i + ln l_i
    P_ij = exp(S_ij - m_i) / l_i = exp(S_ij - LSE_i)           O = P V

    dV = P^T dO        dP = dO V^T        D_i = sum_d dO_id O_id        dS = P (dP - D) [f'(S)]
    dQ = softmax_scale dS K               dK = softmax_scale dS^T Q

(Vaswani et al., arXiv 1706.03762; blocked as in Dao et al., arXiv 2205.14135, and Dao, arXiv
2307.08691.)  A query that sees no key has O = 0, LSE = -inf and zero gradients.  The values of a
masked pair, NaN and infinity included, have no effect.  A visible score of -inf has weight 0 and no
effect either.  Every other visible pair has a positive weight, so a visible infinity in V reaches O
even if its weight is too small for a double.

Shapes: q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv, head_dim), v (batch,
heads_kv, seqlen_kv, head_dim_v), of any float dtype and strides, on one device.  Query head h reads
key head h // group, group = heads_q // heads_kv.  Inputs are converted to fp64, which is exact, one
block at a time, or K and V at once if they are small; results are fp64 on the inputs' device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.blocks import Block, Inputs, Size, Tile
from references.definition import Attention
from references.positions import (
    Choice,
    largest_norms,
    positions,
)
from references.row_blocks import LOWEST, contract, special_terms


@dataclass(frozen=True, eq=False)
class Forward:
    """out (batch, heads_q, rows, head_dim_v) and the natural-log lse (batch, heads_q, rows), both
    fp64."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Backward:
    """dq (batch, heads_q, seqlen_q, head_dim), dk and dv (batch, heads_kv, columns, head_dim or
    head_dim_v), all fp64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


# up to this |S|, exp needs no row maximum: exp(+-100) = 1e+-43 is far inside fp64's range
_NO_SHIFT = 100.0


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention,
    *,
    rows: Choice = None,
    block_q: Size = None,
    block_kv: Size = None,
) -> Forward:
    """O and LSE of the chosen rows, in blocks of rows and keys.  Memory holds the inputs, the
    outputs and one tile of scores.

    block_q: rows of one head in a tile; block_kv: keys in a tile.
    Raises ValueError for shapes that do not fit each other, and for rows out of range.
    """
    inputs = Inputs(q, k, v, attention)
    chosen = positions(rows, inputs.seqlen_q, "rows")
    out, lse = inputs.zeros(len(chosen), v.shape[-1]), inputs.zeros(len(chosen), 1)
    size_q, size_k, size_v = largest_norms(q, inputs.k, inputs.v)
    finite, bound = math.isfinite(size_v), abs(attention.softmax_scale) * size_q * size_k
    if attention.score_mod is not None and math.isfinite(bound):
        reached = attention.score_mod.reach(inputs.extent, torch.tensor(bound, dtype=torch.float64))
        bound = float(reached)
    small = bound <= _NO_SHIFT
    for heads, at, part, tiles in inputs.blocks(chosen, range(inputs.seqlen_kv), block_q, block_kv):
        q_block = inputs.rows(inputs.q, heads, at) * attention.softmax_scale
        o, row_lse = _online_softmax(
            inputs, q_block, tiles, shift=not (small and finite), finite=finite
        )
        out[heads, :, part], lse[heads, :, part] = inputs.unfold(o), inputs.unfold(row_lse)
    return Forward(
        out.view(*q.shape[:2], len(chosen), v.shape[-1]), lse.view(*q.shape[:2], len(chosen))
    )


def _online_softmax(
    inputs: Inputs, q: Tensor, tiles: list[Tile], *, shift: bool, finite: bool
) -> tuple[Tensor, Tensor]:
    """O and LSE (last dimension 1) of folded rows; q is scaled.  Without `shift` m = 0; finite: V
    has no NaN or infinity."""
    out, special, row_sum = (
        q.new_zeros((*q.shape[:-1], n)) for n in (inputs.v.shape[-1], inputs.v.shape[-1], 1)
    )
    row_max = torch.full_like(row_sum, -math.inf if shift else 0.0)
    for tile in tiles:
        k, v = tile.load(inputs.k), tile.load(inputs.v)
        scores = tile.mask_(tile.modify_(torch.bmm(q, k.mT)))
        if not finite:
            special += special_terms(scores != -math.inf, v)
            v = v.nan_to_num(0.0, 0.0, 0.0)
        if shift:
            # The maximum stays finite before a key is visible, so that -inf - row_max stays -inf.
            previous, row_max = (
                row_max,
                torch.maximum(row_max, scores.amax(-1, keepdim=True)).clamp_(min=LOWEST),
            )
            rescale = (previous - row_max).exp_()
            out.mul_(rescale)
            row_sum.mul_(rescale)
            scores.sub_(row_max)
        p = scores.exp_()
        row_sum += p.sum(-1, keepdim=True)
        out.baddbmm_(p, v)
    out.div_(torch.where(row_sum == 0, 1.0, row_sum))
    return out.add_(special), row_max.add_(row_sum.log_())


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    attention: Attention,
    *,
    columns: Choice = None,
    block_q: Size = None,
    block_kv: Size = None,
) -> Backward:
    """dQ, dK and dV for dout (batch, heads_q, seqlen_q, head_dim_v), in blocks as in `forward`.

    columns: the keys whose dK and dV are computed; dQ, which needs every key, then has no rows (see
    `query_gradient`). Raises ValueError as `forward` does.
    """
    inputs = Inputs(q, k, v, attention, dout)
    keys = positions(columns, inputs.seqlen_kv, "columns")
    saved = forward(q, k, v, attention, block_q=block_q, block_kv=block_kv)
    dq = inputs.zeros(inputs.seqlen_q if columns is None else 0, q.shape[-1])
    dk, dv = (
        x.new_zeros((len(x), len(keys), x.shape[-1]), dtype=torch.float64)
        for x in (inputs.k, inputs.v)
    )
    blocks = inputs.blocks(range(inputs.seqlen_q), keys, block_q, block_kv)
    _add_gradients(inputs, saved, blocks, dq if columns is None else None, (dk, dv))
    return Backward(
        *(
            x.view(*like.shape[:2], *x.shape[1:])
            for x, like in ((dq.flatten(0, 1), q), (dk, k), (dv, v))
        )
    )


def query_gradient(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attention: Attention, *, rows: Choice = None
) -> Tensor:
    """dQ of the chosen rows alone, (batch, heads_q, rows, head_dim), fp64; raises ValueError as
    `forward` does."""
    inputs = Inputs(q, k, v, attention, dout)
    chosen = positions(rows, inputs.seqlen_q, "rows")
    dq = inputs.zeros(len(chosen), q.shape[-1])
    saved, keys = forward(q, k, v, attention, rows=rows), range(inputs.seqlen_kv)
    _add_gradients(inputs, saved, inputs.blocks(chosen, keys, None, None), dq, None)
    return dq.view(*q.shape[:2], *dq.shape[2:])


def _add_gradients(
    inputs: Inputs,
    saved: Forward,
    blocks: Iterator[Block],
    dq: Tensor | None,
    dkv: tuple[Tensor, Tensor] | None,
) -> None:
    """Add each tile's share to dq and (dk, dv), except to None; `saved` and `dq` hold the chosen
    rows in order."""
    scale, mod = inputs.attention.softmax_scale, inputs.attention.score_mod
    finite = all(map(math.isfinite, largest_norms(inputs.q, inputs.k, inputs.v, inputs.dout)))
    out, lse = (
        x.view(*inputs.q.shape[:2], *x.shape[2:]) for x in (saved.out, saved.lse.unsqueeze(-1))
    )
    lse = torch.where(lse == -math.inf, math.inf, lse)  # an empty row: exp(S - inf) = 0
    for heads, at, part, tiles in blocks:
        q, do = inputs.rows(inputs.q, heads, at) * scale, inputs.rows(inputs.dout, heads, at)
        row_lse, o = (x[heads, :, part].flatten(1, 2) for x in (lse, out))
        delta = (do * o).sum(-1, keepdim=True)
        for tile in tiles:
            k, v = tile.load(inputs.k), tile.load(inputs.v)
            scores = tile.modify_(torch.bmm(q, k.mT))
            slope = None if mod is None else mod.slope(scores)
            tile.mask_(scores)
            seen = None if finite else scores != -math.inf
            p = scores.sub_(row_lse).exp_()
            ds = torch.bmm(do, v.mT).sub_(delta).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            if seen is not None:
                p, ds = torch.where(seen, p, 0.0), torch.where(seen, ds, 0.0)
            if dq is not None:
                dq[heads, :, part] += inputs.unfold(contract(ds, k, seen).mul_(scale))
            if dkv is not None:
                seen = None if seen is None else seen.mT
                dkv[0][heads, tile.part] += contract(ds.mT, q, seen)
                dkv[1][heads, tile.part] += contract(p.mT, do, seen)
