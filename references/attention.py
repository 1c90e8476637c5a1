"""Attention and its gradients in double precision.

For one head, over the visible pairs alone:

    S = softmax_scale Q K^T,  with a softcap c > 0:  S <- c tanh(S / c)
    m_i = max_j S_ij        l_i = sum_j exp(S_ij - m_i)        LSE_i = m_i + ln l_i
    P_ij = exp(S_ij - m_i) / l_i = exp(S_ij - LSE_i)           O = P V

    dV = P^T dO        dP = dO V^T        D_i = sum_d dO_id O_id        dS = P (dP - D) [1 - tanh^2(S / c)]
    dQ = softmax_scale dS K               dK = softmax_scale dS^T Q

(Vaswani et al., arXiv 1706.03762; blocked as in Dao et al., arXiv 2205.14135, and Dao, arXiv 2307.08691.)  A query that sees
no key has O = 0, LSE = -inf and zero gradients.  What a masked pair holds, NaN and infinity included, has no effect; nor has a
visible score of -inf, whose weight is 0.  Every other visible pair has a positive weight, so that a visible infinity in V
reaches O even where its weight is too small for a double.

Shapes: q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv, head_dim), v (batch, heads_kv, seqlen_kv,
head_dim_v), of any float dtype and strides, on one device.  Query head h reads key head h // group, group = heads_q //
heads_kv.  Inputs are converted to fp64, which is exact, one block at a time; results are fp64 on the inputs' device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.masks import Full, Mask, intersect

Choice = Tensor | slice | None  # positions along one dimension; None: all of them
Size = int | None  # None: what suits the device
Positions = range | Tensor

_LOWEST = torch.finfo(torch.float64).min


@dataclass(frozen=True)
class Attention:
    """The mathematics of one problem.  softmax_scale may be zero or negative; softcap 0 means none."""

    mask: Mask
    softmax_scale: float
    softcap: float = 0.0


@dataclass(frozen=True, eq=False)
class Forward:
    """out (batch, heads_q, rows, head_dim_v) and the natural-log lse (batch, heads_q, rows), both fp64."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Backward:
    """dq (batch, heads_q, seqlen_q, head_dim), dk and dv (batch, heads_kv, columns, head_dim or head_dim_v), all fp64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of some query heads against all keys, or chosen ones: every quantity of the softmax in fp64, for error bounds.

    `index` puts a result where it belongs: `whole.flatten(0, 1)[block.index] = part`, whole being (batch, heads_q, rows, ...).
    Shapes: scores, uncapped, magnitude, visible (bool), probabilities (heads, rows, keys); row_max, row_sum, lse
    (heads, rows); out (heads, rows, head_dim_v); values (heads, keys, head_dim_v).  `visible` may be an expanded view.
    """

    index: tuple[slice, slice]  # into (batch * heads_q, the chosen rows)
    rows: Tensor  # positions of these rows in seqlen_q, int64, on the CPU
    scores: Tensor  # scaled and capped; -inf where masked
    uncapped: Tensor  # scaled, before the softcap; -inf where masked; `scores` itself without a softcap
    magnitude: Tensor  # |softmax_scale| |Q| |K|^T; 0 where masked
    visible: Tensor
    probabilities: Tensor  # 0 where masked
    row_max: Tensor  # m; -inf for an empty row
    row_sum: Tensor  # l; 0 for an empty row
    out: Tensor
    lse: Tensor
    values: Tensor  # V of each head, 0 at keys that no row of the block sees


# A tile of scores is folded rows x keys: few enough launches and rows enough to keep an H100's fp64 matrix units busy (the
# best of 8192..32768 x 384..2048 measured there); on a CPU, 4 MiB.
_ROWS, _COLUMNS = {"cpu": 1024, "cuda": 8192}, {"cpu": 512, "cuda": 2048}
_LOADED = {"cpu": 2**21, "cuda": 2**25}  # elements of keys and values (or of inputs being measured) in fp64 at once
_BUDGET = {"cpu": 2**21, "cuda": 2**26}  # elements of one tensor of `row_blocks`
_NO_SHIFT = 100.0  # up to this |S| the row maximum need not be subtracted: exp(+-100) = 1e+-43 is far inside fp64's range


def forward(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, *, rows: Choice = None, block_q: Size = None, block_kv: Size = None
) -> Forward:
    """O and LSE of the chosen rows, blocked over rows and keys: memory for one tile of scores, the inputs and the outputs.

    block_q: rows of one head at once; block_kv: keys at once.
    Raises ValueError for shapes that do not fit each other, and for rows out of range.
    """
    inputs = _Inputs(q, k, v, attention)
    chosen = _positions(rows, inputs.seqlen_q, "rows")
    out, lse = inputs.zeros(len(chosen), v.shape[-1]), inputs.zeros(len(chosen), 1)
    finite = math.isfinite(_largest_norm(v))
    bound = abs(attention.softmax_scale) * _largest_norm(q) * _largest_norm(k)
    small = math.isfinite(bound) and min(bound, attention.softcap or bound) <= _NO_SHIFT
    for heads, at, part, tiles in inputs.blocks(chosen, range(inputs.seqlen_kv), block_q, block_kv):
        q_block = inputs.rows(inputs.q, heads, at) * attention.softmax_scale
        o, row_lse = _online_softmax(inputs, q_block, tiles, shift=not (small and finite), finite=finite)
        out[heads, :, part], lse[heads, :, part] = inputs.unfold(o), inputs.unfold(row_lse)
    return Forward(out.view(*q.shape[:2], len(chosen), v.shape[-1]), lse.view(*q.shape[:2], len(chosen)))


def _online_softmax(inputs: _Inputs, q: Tensor, tiles: list[_Tile], *, shift: bool, finite: bool) -> tuple[Tensor, Tensor]:
    """O and LSE (last dimension 1) of folded rows; q is scaled.  Without `shift` m = 0; finite: V has no NaN or infinity."""
    out, special, row_sum = (q.new_zeros((*q.shape[:-1], n)) for n in (inputs.v.shape[-1], inputs.v.shape[-1], 1))
    row_max = torch.full_like(row_sum, -math.inf if shift else 0.0)
    for tile in tiles:
        k, v = tile.load(inputs.k), tile.load(inputs.v)
        scores = tile.mask_(inputs.cap_(torch.bmm(q, k.mT)))
        if not finite:
            special += _special(scores != -math.inf, v)
            v = v.nan_to_num(0.0, 0.0, 0.0)
        if shift:
            # Kept finite where nothing is visible yet, so that -inf - row_max stays -inf.
            previous, row_max = row_max, torch.maximum(row_max, scores.amax(-1, keepdim=True)).clamp_(min=_LOWEST)
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
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, *, rows: Choice = None, columns: Choice = None, budget: Size = None
) -> Iterator[RowBlock]:
    """The chosen rows in the textbook's form, whole rows of scores at once, as many heads and rows as `budget` allows.

    columns: the keys that there are; all quantities are of these alone, under the mask of all.  budget: elements of one tensor
    of scores; at least one row of one group of heads is taken.  Raises ValueError as `forward` does.
    """
    inputs = _Inputs(q, k, v, attention)
    chosen, keys = _positions(rows, inputs.seqlen_q, "rows"), _positions(columns, inputs.seqlen_kv, "columns")
    budget = budget or _BUDGET[q.device.type]
    row_size = inputs.group * max(len(keys), 1)
    block_q = min(max(budget // row_size, 1), max(len(chosen), 1))
    for heads in _slices(inputs.total, max(budget // (row_size * block_q), 1)):
        loaded = keys, _take(inputs.k[heads], keys), _take(inputs.v[heads], keys)
        for part in _slices(len(chosen), block_q):
            yield _row_block(inputs, heads, (chosen, part), loaded)


_Loaded = tuple[Positions, Tensor, Tensor]  # keys' positions in seqlen_kv, and what they hold of K and V, in fp64


def _row_block(inputs: _Inputs, heads: slice, chosen: tuple[Positions, slice], loaded: _Loaded) -> RowBlock:
    scale, group, rows, (keys, k, v) = inputs.attention.softmax_scale, inputs.group, chosen[0][chosen[1]], loaded
    q = inputs.rows(inputs.q, heads, rows)
    shape = (len(k) * group, len(rows), len(keys))
    visible = inputs.visible(heads, rows, keys).expand(len(k), group, -1, -1).reshape(shape)
    hidden = None if isinstance(inputs.attention.mask, Full) else ~visible
    uncapped = torch.bmm(q, k.mT).mul_(scale).view(shape)
    magnitude = torch.bmm(q.abs(), k.abs().mT).mul_(abs(scale)).view(shape)
    scores = inputs.cap_(uncapped.clone()) if inputs.attention.softcap else uncapped
    values = v.unsqueeze(1).expand(-1, group, -1, -1).flatten(0, 1)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
        uncapped.masked_fill_(hidden, -math.inf)
        magnitude.masked_fill_(hidden, 0.0)
        values = torch.where(visible.any(-2).unsqueeze(-1), values, 0.0)
    row_max = scores.amax(-1, keepdim=True) if shape[-1] else scores.new_full((*shape[:-1], 1), -math.inf)
    p = (scores - row_max.clamp(min=_LOWEST)).exp_()
    row_sum = p.sum(-1, keepdim=True)
    p.div_(torch.where(row_sum == 0, 1.0, row_sum))
    if hidden is not None and math.isnan(row_sum.sum()):
        p.masked_fill_(hidden, 0.0)  # a NaN row is NaN where it is visible alone
    out = _contract(p, values, None if math.isfinite(values.sum()) else scores != -math.inf)
    row_max, row_sum, index = row_max[..., 0], row_sum[..., 0], (slice(heads.start * group, heads.stop * group), chosen[1])
    lse = row_max + row_sum.log()
    return RowBlock(index, _tensor(rows), scores, uncapped, magnitude, visible, p, row_max, row_sum, out, lse, values)


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
    """dQ, dK and dV for dout (batch, heads_q, seqlen_q, head_dim_v), blocked as `forward` is.

    columns: the keys whose dK and dV are wanted; dQ, which needs every key, then has no rows (see `query_gradient`).
    Raises ValueError as `forward` does.
    """
    inputs = _Inputs(q, k, v, attention, dout)
    keys = _positions(columns, inputs.seqlen_kv, "columns")
    saved = forward(q, k, v, attention, block_q=block_q, block_kv=block_kv)
    dq = inputs.zeros(inputs.seqlen_q if columns is None else 0, q.shape[-1])
    dk, dv = (x.new_zeros((len(x), len(keys), x.shape[-1]), dtype=torch.float64) for x in (inputs.k, inputs.v))
    blocks = inputs.blocks(range(inputs.seqlen_q), keys, block_q, block_kv)
    _add_gradients(inputs, saved, blocks, dq if columns is None else None, (dk, dv))
    return Backward(*(x.view(*like.shape[:2], *x.shape[1:]) for x, like in ((dq.flatten(0, 1), q), (dk, k), (dv, v))))


def query_gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attention: Attention, *, rows: Choice = None) -> Tensor:
    """dQ of the chosen rows alone, (batch, heads_q, rows, head_dim), fp64; raises ValueError as `forward` does."""
    inputs = _Inputs(q, k, v, attention, dout)
    chosen = _positions(rows, inputs.seqlen_q, "rows")
    dq = inputs.zeros(len(chosen), q.shape[-1])
    saved, keys = forward(q, k, v, attention, rows=rows), range(inputs.seqlen_kv)
    _add_gradients(inputs, saved, inputs.blocks(chosen, keys, None, None), dq, None)
    return dq.view(*q.shape[:2], *dq.shape[2:])


def _add_gradients(
    inputs: _Inputs, saved: Forward, blocks: Iterator[_Block], dq: Tensor | None, dkv: tuple[Tensor, Tensor] | None
) -> None:
    """Add each tile's share to dq and (dk, dv), those that are wanted; `saved` and `dq` hold the chosen rows in order."""
    scale, softcap = inputs.attention.softmax_scale, inputs.attention.softcap
    finite = all(math.isfinite(_largest_norm(x)) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = (x.view(*inputs.q.shape[:2], *x.shape[2:]) for x in (saved.out, saved.lse.unsqueeze(-1)))
    lse = torch.where(lse == -math.inf, math.inf, lse)  # an empty row: exp(S - inf) = 0
    for heads, at, part, tiles in blocks:
        q, do = inputs.rows(inputs.q, heads, at) * scale, inputs.rows(inputs.dout, heads, at)
        row_lse, o = (x[heads, :, part].flatten(1, 2) for x in (lse, out))
        delta = (do * o).sum(-1, keepdim=True)
        for tile in tiles:
            k, v = tile.load(inputs.k), tile.load(inputs.v)
            scores = inputs.cap_(torch.bmm(q, k.mT))
            slope = 1.0 - (scores / softcap).square_() if softcap else 1.0
            tile.mask_(scores)
            seen = None if finite else scores != -math.inf
            p = scores.sub_(row_lse).exp_()
            ds = torch.bmm(do, v.mT).sub_(delta).mul_(p).mul_(slope)
            if seen is not None:
                p, ds = torch.where(seen, p, 0.0), torch.where(seen, ds, 0.0)
            if dq is not None:
                dq[heads, :, part] += inputs.unfold(_contract(ds, k, seen).mul_(scale))
            if dkv is not None:
                seen = None if seen is None else seen.mT
                dkv[0][heads, tile.part] += _contract(ds.mT, q, seen)
                dkv[1][heads, tile.part] += _contract(p.mT, do, seen)


def _contract(weights: Tensor, factor: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ factor over the seen pairs; None: every factor is finite, so that a weight of zero suffices."""
    if seen is None:
        return torch.bmm(weights, factor)
    return torch.bmm(weights, factor.nan_to_num(0.0, 0.0, 0.0)) + _special(seen, factor)


def _special(seen: Tensor, values: Tensor) -> Tensor:
    """What the NaN and infinities of `values` (n, keys, d) add to sums over the seen pairs (n, rows, keys)."""
    total = values.new_zeros((*seen.shape[:-1], values.shape[-1]))
    for value, found in ((math.inf, values == math.inf), (-math.inf, values == -math.inf), (math.nan, values.isnan())):
        total += torch.where(torch.bmm(seen.to(torch.float64), found.to(torch.float64)) > 0, value, 0.0)
    return total


def _positions(choice: Choice, length: int, name: str) -> Positions:
    """The chosen positions out of `length`: a range where it can be one, which costs nothing to cut; else int64 on the CPU."""
    if choice is None or isinstance(choice, slice):
        return range(length)[choice or slice(None)]
    chosen, integers = choice.to("cpu", torch.int64), choice.dtype != torch.bool and not choice.is_floating_point()
    if choice.ndim != 1 or not integers or bool(((chosen < 0) | (chosen >= length)).any()):
        raise ValueError(f"{name}: give a slice, or integer positions in 0..{length - 1} in a one-dimensional tensor")
    return chosen


def _tensor(p: Positions, device: torch.device | str = "cpu") -> Tensor:
    return p.to(device) if isinstance(p, Tensor) else torch.arange(p.start, p.stop, p.step, device=device)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _take(x: Tensor, positions: Positions) -> Tensor:
    """x (..., seqlen, d) at these positions, in fp64."""
    if isinstance(positions, range) and positions.step == 1:
        return x[..., positions.start : positions.stop, :].to(torch.float64)
    return x.index_select(-2, _tensor(positions, x.device)).to(torch.float64)


def _largest_norm(x: Tensor) -> float:
    """The largest Euclidean norm over the last dimension; NaN or inf if an element is, or if it overflows."""
    if not x.numel():
        return 0.0
    step = max(_LOADED[x.device.type] * x.shape[-2] // x.numel(), 1)
    parts = [torch.linalg.vector_norm(x[..., part, :].to(torch.float64), dim=-1).amax() for part in _slices(x.shape[-2], step)]
    return float(torch.stack(parts).amax())


@dataclass(frozen=True, eq=False)
class _Tile:
    """Some keys against a block of rows."""

    inputs: _Inputs
    heads: slice  # key heads
    rows: Positions  # in seqlen_q
    part: slice  # of the chosen keys
    keys: Positions  # in seqlen_kv
    cut: bool  # whether the mask may hide some of it

    def load(self, x: Tensor) -> Tensor:
        return _take(x[self.heads], self.keys)

    def mask_(self, scores: Tensor) -> Tensor:
        """Put -inf at the masked pairs of scores (key heads, folded rows, keys)."""
        if self.cut:
            hidden = ~self.inputs.visible(self.heads, self.rows, self.keys)
            self.inputs.unfold(scores).masked_fill_(hidden, -math.inf)
        return scores


_Block = tuple[slice, Positions, slice, list[_Tile]]  # key heads, the rows' positions, their place among the chosen, tiles


class _Inputs:
    """One checked problem, cut into blocks of key heads, rows and keys.

    Heads are flattened: q and dout are (batch * heads_kv, group, seqlen_q, ...), k and v (batch * heads_kv, seqlen_kv, ...).
    A block's rows are folded, (key heads, group * rows, ...): one product serves the group, and no key is repeated.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, dout: Tensor | None = None) -> None:
        self.batch, heads_q, self.seqlen_q, head_dim = q.shape
        self.heads_kv, self.seqlen_kv = k.shape[1:3]
        dout = v.new_zeros(1).expand(*q.shape[:3], v.shape[-1]) if dout is None else dout
        shape_k, shape_dout = (self.batch, *k.shape[1:3], head_dim), (*q.shape[:3], v.shape[-1])
        for name, x, shape in (("k", k, shape_k), ("v", v, (*shape_k[:3], v.shape[-1])), ("dout", dout, shape_dout)):
            if x.shape != shape:
                raise ValueError(f"{name}: shape {tuple(x.shape)}, where {shape} fits the other inputs")
        if heads_q % self.heads_kv:
            raise ValueError(f"q: {heads_q} heads are no multiple of the {self.heads_kv} heads of k")
        if attention.softcap < 0:
            raise ValueError(f"softcap: {attention.softcap} is negative (0 means none)")
        attention.mask.check(self.batch)
        self.attention, self.group, self.total = attention, heads_q // self.heads_kv, self.batch * self.heads_kv
        self.q, self.dout = (x.reshape(self.total, self.group, *x.shape[2:]) for x in (q, dout))
        self.k, self.v = k.flatten(0, 1), v.flatten(0, 1)
        self._mod = attention.mask.mod(self.seqlen_q, self.seqlen_kv, q.device)

    def zeros(self, rows: int, dim: int) -> Tensor:
        return self.q.new_zeros((self.total, self.group, rows, dim), dtype=torch.float64)

    def rows(self, x: Tensor, heads: slice, positions: Positions) -> Tensor:
        """q, dout or an output at these positions, folded, in fp64."""
        return _take(x[heads], positions).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """(key heads, folded rows, ...) as (key heads, group, rows, ...)."""
        return x.view(len(x), self.group, x.shape[1] // self.group, x.shape[2])

    def cap_(self, scores: Tensor) -> Tensor:
        c = self.attention.softcap
        return scores.div_(c).tanh_().mul_(c) if c else scores

    def visible(self, heads: slice, rows: Positions, keys: Positions) -> Tensor:
        """The mask, broadcastable to (key heads, group, rows, keys)."""
        device, flat = self.q.device, torch.arange(heads.start, heads.stop, device=self.q.device)[:, None, None, None]
        h = flat % self.heads_kv * self.group + torch.arange(self.group, device=device)[:, None, None]
        return self._mod(flat // self.heads_kv, h, _tensor(rows, device)[:, None], _tensor(keys, device))

    def blocks(self, rows: Positions, keys: Positions, block_q: Size, block_kv: Size) -> Iterator[_Block]:
        """The chosen rows, a block at a time, each with the tiles of those chosen keys that some row of it may see."""
        device, atoms, zero = self.q.device.type, self.attention.mask.atoms, torch.zeros(1, dtype=torch.int64)
        block_q, block_kv = block_q or max(_ROWS[device] // self.group, 1), block_kv or _COLUMNS[device]
        count = _ROWS[device] // max(self.group * min(block_q, len(rows)), 1)
        loaded = _LOADED[device] // (block_kv * (self.k.shape[-1] + self.v.shape[-1]))
        intervals = [atom for atom in atoms if atom.interval(1, 1, zero, zero) is not None]
        bounds = intersect(*intervals).row_bounds(self.batch, self.seqlen_q, self.seqlen_kv)
        pieces = [(piece, keys[piece], _tensor(keys[piece]).aminmax()) for piece in _slices(len(keys), block_kv)]
        ends = [(piece, at, int(first), int(last)) for piece, at, (first, last) in pieces]
        for heads in _slices(self.total, max(min(count, loaded), 1)):
            batches = slice(heads.start // self.heads_kv, (heads.stop - 1) // self.heads_kv + 1)
            for part in _slices(len(rows), block_q):
                low, high = (bound[batches][:, _tensor(rows[part])] for bound in bounds)
                uncut = slice(int(low.max()), int(high.min())) if len(intervals) == len(atoms) else slice(self.seqlen_kv, 0)
                low, high = low[low < high], high[low < high]
                seen = slice(int(low.min()), int(high.max())) if len(low) else slice(0, 0)
                tiles = [
                    _Tile(self, heads, rows[part], columns, at, first < uncut.start or last >= uncut.stop)
                    for columns, at, first, last in ends
                    if first < seen.stop and last >= seen.start
                ]
                yield heads, rows[part], part, tiles
