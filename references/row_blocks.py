"""The softmax of blocks of rows in double precision, with every quantity that an error bound needs;
`references.attention` says what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.blocks import Inputs, Size
from references.definition import Attention
from references.masks import Full
from references.positions import Choice, Positions, Sizes, positions, slices, take, tensor

LOWEST = torch.finfo(torch.float64).min
_BUDGET = {"cpu": 2**21, "cuda": 2**26}  # elements of one tensor of `row_blocks`


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Every quantity of the softmax in fp64, for error bounds: some rows of some query heads and
    all or chosen keys.

    `index` places a result: `whole.flatten(0, 1)[block.index] = part`, with whole (batch, heads_q,
    rows, ...). Shapes: scores, scaled, magnitude, visible (bool), probabilities (heads, rows,
    keys); row_max, row_sum, lse (heads, rows); out (heads, rows, head_dim_v); values (heads, keys,
    head_dim_v); queries (heads, rows, head_dim); keys_of_heads (key heads, keys, head_dim).
    `visible` can be an expanded view. Sizes: of each row of Q, (heads, rows, 1); of each column of
    K and V, (heads, 1, head_dim) and (heads, 1, head_dim_v).
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
    queries: Tensor
    keys_of_heads: Tensor
    key_heads: Tensor  # int64 (heads,): where the keys of each head are


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
    seen = inputs.visible(heads, rows, keys)
    visible = seen.expand(len(k), group, len(rows), len(keys)).reshape(shape)
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
        if scaled is not scores:
            scaled.masked_fill_(hidden, -math.inf)
        magnitude.masked_fill_(hidden, 0.0)
        values = torch.where(visible.any(-2).unsqueeze(-1), values, 0.0)
    row_max = (
        scores.amax(-1, keepdim=True) if shape[-1] else scores.new_full((*shape[:-1], 1), -math.inf)
    )
    p = torch.sub(scores, row_max.clamp(min=LOWEST), out=loaded.room(3, shape)).exp_()
    row_sum = p.sum(-1, keepdim=True)
    p.div_(row_sum.clamp(min=1.0))  # exp(m - m) = 1 is in the sum, unless that is empty
    if hidden is not None and math.isnan(row_sum.sum()):
        p.masked_fill_(hidden, 0.0)  # a row with NaN is NaN only at visible keys
    out = contract(p, values, None if math.isfinite(values.sum()) else scores != -math.inf)
    row_max, row_sum, index = (
        row_max[..., 0],
        row_sum[..., 0],
        (slice(heads.start * group, heads.stop * group), chosen[1]),
    )
    lse = row_max + row_sum.log()
    queries, key_heads = (
        q.view(shape[0], shape[1], -1),
        torch.arange(shape[0], device=q.device) // group,
    )
    of_keys, of_values = (x.repeated(group) for x in loaded.sizes)
    sizes = Sizes.of(queries, -1), of_keys, of_values
    softmax = scores, scaled, magnitude, visible, p, row_max, row_sum, out, lse, values
    return RowBlock(index, tensor(rows), *softmax, loaded.part, *sizes, queries, k, key_heads)


def contract(weights: Tensor, factor: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ factor over the seen pairs.  seen None: every factor is finite, so a weight of zero
    hides a pair."""
    if seen is None:
        return torch.bmm(weights, factor)
    return torch.bmm(weights, factor.nan_to_num(0.0, 0.0, 0.0)) + special_terms(seen, factor)


def special_terms(seen: Tensor, values: Tensor) -> Tensor:
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
