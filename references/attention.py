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
block at a time; results are fp64 on the inputs' device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.blocks import Block, Inputs, Size, Tile
from references.definition import Attention
from references.masks import Full
from references.positions import (
    Choice,
    Positions,
    Sizes,
    largest_norm,
    positions,
    slices,
    take,
    tensor,
)

_LOWEST = torch.finfo(torch.float64).min


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


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Every quantity of the softmax in fp64, for error bounds: some rows of some query heads and
    all or chosen keys.

    `index` places a result: `whole.flatten(0, 1)[block.index] = part`, with whole (batch, heads_q,
    rows, ...). Shapes: scores, scaled, magnitude, visible (bool), probabilities (heads, rows,
    keys); row_max, row_sum, lse (heads, rows); out (heads, rows, head_dim_v); values (heads, keys,
    head_dim_v).  `visible` can be an expanded view. Sizes: of each row of Q, (heads, rows, 1); of
    each column of K and V, (heads, 1, head_dim) and (heads, 1, head_dim_v).
    """

    index: tuple[slice, slice]  # into (batch * heads_q, the chosen rows)
    rows: Tensor  # positions of these rows in seqlen_q, int64, on the CPU
    scores: Tensor  # scaled and modified; -inf where masked
    # scaled, before the score mod; -inf where masked; the tensor `scores` without a score mod
    scaled: Tensor
    magnitude: Tensor  # |softmax_scale| |Q| |K|^T; 0 where masked
    visible: Tensor
    probabilities: Tensor  # 0 where masked
    row_max: Tensor  # m; -inf for an empty row
    row_sum: Tensor  # l; 0 for an empty row
    out: Tensor
    lse: Tensor
    values: Tensor  # V of each head, 0 at keys that no row of the block sees
    keys: slice  # the part of the chosen keys in this block
    query_sizes: Sizes
    key_sizes: Sizes  # of all chosen keys, visible or not
    value_sizes: Sizes


_BUDGET = {"cpu": 2**21, "cuda": 2**26}  # elements of one tensor of `row_blocks`
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
    finite = math.isfinite(largest_norm(v))
    bound = abs(attention.softmax_scale) * largest_norm(q) * largest_norm(k)
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
            special += _special(scores != -math.inf, v)
            v = v.nan_to_num(0.0, 0.0, 0.0)
        if shift:
            # The maximum stays finite before a key is visible, so that -inf - row_max stays -inf.
            previous, row_max = (
                row_max,
                torch.maximum(row_max, scores.amax(-1, keepdim=True)).clamp_(min=_LOWEST),
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


def row_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention,
    *,
    rows: Choice = None,
    columns: Choice = None,
    budget: Size = None,
    passing: bool = False,
) -> Iterator[RowBlock]:
    """Textbook softmax of the chosen rows, in blocks of whole rows of scores, with as many heads
    and rows as `budget` allows.

    columns: all quantities are of these keys alone, under the mask of all keys.
    budget: elements of one tensor of scores; a block has at least one row of one group of heads.
    passing: all blocks share their memory, so a block must be read before the next one is taken;
    keys at both ends that none of its rows sees are left out.  Raises ValueError as `forward` does.
    """
    inputs = Inputs(q, k, v, attention)
    chosen, keys = (
        positions(rows, inputs.seqlen_q, "rows"),
        positions(columns, inputs.seqlen_kv, "columns"),
    )
    budget = budget or _BUDGET[q.device.type]
    row_size = inputs.group * max(len(keys), 1)
    block_q = min(max(budget // row_size, 1), max(len(chosen), 1))
    together = max(budget // (row_size * block_q), 1)
    size = min(together, inputs.total) * row_size * block_q
    # New memory costs a page fault per page, more time than most sums in it.
    memory = q.new_empty((4, size if passing else 0), dtype=torch.float64)
    for heads in slices(inputs.total, together):
        whole = _Keys.of(inputs, heads, keys, memory)
        for part in slices(len(chosen), block_q):
            yield _row_block(
                inputs,
                heads,
                (chosen, part),
                whole.seen(inputs, heads, chosen[part]) if passing else whole,
            )


@dataclass(frozen=True, eq=False)
class _Keys:
    """Some keys: positions in seqlen_kv, K and V in fp64; part and sizes are those of `RowBlock`.

    memory: space for four tensors of scores, or no elements.
    """

    at: Positions
    k: Tensor
    v: Tensor
    part: slice
    sizes: tuple[Sizes, Sizes]
    memory: Tensor

    @staticmethod
    def of(inputs: Inputs, heads: slice, keys: Positions, memory: Tensor) -> _Keys:
        k, v = take(inputs.k[heads], keys), take(inputs.v[heads], keys)
        return _Keys(keys, k, v, slice(0, len(keys)), (Sizes.of(k, 1), Sizes.of(v, 1)), memory)

    def seen(self, inputs: Inputs, heads: slice, rows: Positions) -> _Keys:
        """The keys from the first to the last one that any of the rows can see."""
        ends, at = inputs.seen(heads, rows), tensor(self.at)
        inside = ((at >= ends.start) & (at < ends.stop)).nonzero()
        part = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
        return replace(self, at=self.at[part], k=self.k[:, part], v=self.v[:, part], part=part)

    def room(self, n: int, shape: tuple[int, int, int]) -> Tensor:
        """The n-th tensor of scores, of that shape and uninitialised."""
        size = math.prod(shape)
        memory = self.memory[n] if self.memory.shape[1] else self.k.new_empty(size)
        return memory[:size].view(shape)


def _row_block(
    inputs: Inputs, heads: slice, chosen: tuple[Positions, slice], loaded: _Keys
) -> RowBlock:
    scale, group, rows = inputs.attention.softmax_scale, inputs.group, chosen[0][chosen[1]]
    keys, k, v = loaded.at, loaded.k, loaded.v
    q = inputs.rows(inputs.q, heads, rows)
    shape = (len(k) * group, len(rows), len(keys))
    visible = inputs.visible(heads, rows, keys).expand(len(k), group, -1, -1).reshape(shape)
    hidden = None if isinstance(inputs.attention.mask, Full) else ~visible
    folded = len(k), group * len(rows), len(keys)
    scaled = torch.bmm(q, k.mT, out=loaded.room(0, folded)).mul_(scale)
    magnitude = torch.bmm(q.abs().mul_(abs(scale)), k.abs().mT, out=loaded.room(1, folded)).view(
        shape
    )
    scores = scaled = scaled.view(shape)
    if inputs.attention.score_mod is not None:
        copied = loaded.room(2, folded).copy_(scaled.view(folded))
        scores = inputs.modify_(copied, heads, rows, keys).view(shape)
    values = v.unsqueeze(1).expand(-1, group, -1, -1).flatten(0, 1)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
        scaled.masked_fill_(hidden, -math.inf)
        magnitude.masked_fill_(hidden, 0.0)
        values = torch.where(visible.any(-2).unsqueeze(-1), values, 0.0)
    row_max = (
        scores.amax(-1, keepdim=True) if shape[-1] else scores.new_full((*shape[:-1], 1), -math.inf)
    )
    p = torch.sub(scores, row_max.clamp(min=_LOWEST), out=loaded.room(3, shape)).exp_()
    row_sum = p.sum(-1, keepdim=True)
    p.div_(torch.where(row_sum == 0, 1.0, row_sum))
    if hidden is not None and math.isnan(row_sum.sum()):
        p.masked_fill_(hidden, 0.0)  # a row with NaN is NaN only at visible keys
    out = _contract(p, values, None if math.isfinite(values.sum()) else scores != -math.inf)
    row_max, row_sum, index = (
        row_max[..., 0],
        row_sum[..., 0],
        (slice(heads.start * group, heads.stop * group), chosen[1]),
    )
    lse = row_max + row_sum.log()
    sizes = Sizes.of(q.view(shape[0], shape[1], -1), -1), *(x.repeated(group) for x in loaded.sizes)
    softmax = scores, scaled, magnitude, visible, p, row_max, row_sum, out, lse, values
    return RowBlock(index, tensor(rows), *softmax, loaded.part, *sizes)


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
    finite = all(
        math.isfinite(largest_norm(x)) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
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
                dq[heads, :, part] += inputs.unfold(_contract(ds, k, seen).mul_(scale))
            if dkv is not None:
                seen = None if seen is None else seen.mT
                dkv[0][heads, tile.part] += _contract(ds.mT, q, seen)
                dkv[1][heads, tile.part] += _contract(p.mT, do, seen)


def _contract(weights: Tensor, factor: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ factor over the seen pairs.  seen None: every factor is finite, so a weight of zero
    hides a pair."""
    if seen is None:
        return torch.bmm(weights, factor)
    return torch.bmm(weights, factor.nan_to_num(0.0, 0.0, 0.0)) + _special(seen, factor)


def _special(seen: Tensor, values: Tensor) -> Tensor:
    """The NaN and infinities that `values` (n, keys, d) add to sums over the seen pairs (n, rows,
    keys)."""
    total = values.new_zeros((*seen.shape[:-1], values.shape[-1]))
    for value, found in (
        (math.inf, values == math.inf),
        (-math.inf, values == -math.inf),
        (math.nan, values.isnan()),
    ):
        total += torch.where(
            torch.bmm(seen.to(torch.float64), found.to(torch.float64)) > 0, value, 0.0
        )
    return total
