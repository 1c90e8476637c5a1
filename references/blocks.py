"""One problem of attention, cut into blocks of rows and tiles of the keys that the rows can see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from references.masks import Full, Mask, intersect
from references.positions import LOADED, Positions, ends, index, slices, take, tensor
from references.score_mods import Extent

if TYPE_CHECKING:
    from references.definition import Attention

Size = int | None  # None: the default of the device

# A tile of scores is folded rows x keys.  On an H100 it is the fastest of 8192..32768 x 384..2048:
# few launches, and rows enough to keep fp64 matrix units busy.  On a CPU it is 4 MiB.
_ROWS, _COLUMNS = {"cpu": 1024, "cuda": 8192}, {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True, eq=False)
class Tile:
    """Some keys for a block of rows."""

    inputs: Inputs
    heads: slice  # key heads
    rows: Positions  # in seqlen_q
    part: slice  # of the chosen keys
    keys: Positions  # in seqlen_kv
    cut: bool  # whether the mask can hide some of it

    def load(self, x: Tensor) -> Tensor:
        return take(x[self.heads], self.keys)

    def modify_(self, scores: Tensor) -> Tensor:
        """The score mod of scaled scores (key heads, folded rows, keys), which it can overwrite."""
        return self.inputs.modify_(scores, self.heads, self.rows, self.keys)

    def mask_(self, scores: Tensor) -> Tensor:
        """Put -inf at the masked pairs of scores (key heads, folded rows, keys)."""
        if self.cut:
            hidden = ~self.inputs.visible(self.heads, self.rows, self.keys)
            self.inputs.unfold(scores).masked_fill_(hidden, -math.inf)
        return scores


# key heads, the rows' positions, their place among the chosen rows, tiles
Block = tuple[slice, Positions, slice, list[Tile]]


class Inputs:
    """One checked problem, cut into blocks of key heads, rows and keys.

    Heads are flattened: q and dout are (batch * heads_kv, group, seqlen_q, ...), k and v (batch *
    heads_kv, seqlen_kv, ...). A block's rows are folded, (key heads, group * rows, ...): one
    product serves the group, and no key is repeated.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, dout: Tensor | None = None
    ) -> None:
        self.batch, heads_q, self.seqlen_q, head_dim = q.shape
        self.heads_kv, self.seqlen_kv = k.shape[1:3]
        dout = v.new_zeros(1).expand(*q.shape[:3], v.shape[-1]) if dout is None else dout
        shape_k, shape_dout = (self.batch, *k.shape[1:3], head_dim), (*q.shape[:3], v.shape[-1])
        for name, x, shape in (
            ("k", k, shape_k),
            ("v", v, (*shape_k[:3], v.shape[-1])),
            ("dout", dout, shape_dout),
        ):
            if x.shape != shape:
                raise ValueError(
                    f"{name}: shape {tuple(x.shape)}, where {shape} fits the other inputs"
                )
        if heads_q % self.heads_kv:
            raise ValueError(
                f"q: {heads_q} heads are no multiple of the {self.heads_kv} heads of k"
            )
        attention.mask.check(self.batch)
        self.attention, self.group, self.total = (
            attention,
            heads_q // self.heads_kv,
            self.batch * self.heads_kv,
        )
        self.q, self.dout = (x.reshape(self.total, self.group, *x.shape[2:]) for x in (q, dout))
        self.k, self.v = k.flatten(0, 1), v.flatten(0, 1)
        if k.numel() + v.numel() <= LOADED[k.device.type]:  # once, not for each tile
            self.k, self.v = self.k.to(torch.float64), self.v.to(torch.float64)
        self._visible = attention.mask.mod(self.seqlen_q, self.seqlen_kv, q.device)
        self.extent, mod = Extent(heads_q, self.seqlen_q, self.seqlen_kv), attention.score_mod
        self._modified = None if mod is None else mod.function(self.extent, q.device)

    def zeros(self, rows: int, dim: int) -> Tensor:
        return self.q.new_zeros((self.total, self.group, rows, dim), dtype=torch.float64)

    def rows(self, x: Tensor, heads: slice, positions: Positions) -> Tensor:
        """q, dout or an output at these positions, folded, in fp64."""
        return take(x[heads], positions).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """(key heads, folded rows, ...) as (key heads, group, rows, ...)."""
        return x.view(len(x), self.group, x.shape[1] // self.group, x.shape[2])

    def modify_(self, scores: Tensor, heads: slice, rows: Positions, keys: Positions) -> Tensor:
        """The score mod of scaled scores (key heads, folded rows, keys), which it can overwrite;
        `scores` without a score mod."""
        if self._modified is None:
            return scores
        at = self._at(heads, rows, keys)
        return self._modified(self.unfold(scores), *at).reshape(scores.shape)

    def visible(self, heads: slice, rows: Positions, keys: Positions) -> Tensor:
        """The mask, broadcastable to (key heads, group, rows, keys)."""
        if isinstance(self.attention.mask, Full):
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.q.device)
        return self._visible(*self._at(heads, rows, keys))

    def _at(self, heads: slice, rows: Positions, keys: Positions) -> tuple[Tensor, ...]:
        """Batch, query head, query and key, broadcastable to (key heads, group, rows, keys)."""
        device, flat = (
            self.q.device,
            torch.arange(heads.start, heads.stop, device=self.q.device)[:, None, None, None],
        )
        h = (
            flat % self.heads_kv * self.group
            + torch.arange(self.group, device=device)[:, None, None]
        )
        return flat // self.heads_kv, h, tensor(rows, device)[:, None], tensor(keys, device)

    @cached_property
    def intervals(self) -> list[Mask]:
        """The parts of the mask under which each row sees one interval."""
        zero = torch.zeros(1, dtype=torch.int64)
        return [
            atom
            for atom in self.attention.mask.atoms
            if atom.interval(1, 1, zero, zero) is not None
        ]

    @cached_property
    def _row_bounds(self) -> tuple[Tensor, Tensor]:
        return intersect(*self.intervals).row_bounds(self.batch, self.seqlen_q, self.seqlen_kv)

    def bounds(self, heads: slice, rows: Positions) -> tuple[Tensor, Tensor]:
        """[low, high) of the keys that each row can see, (batches, rows)."""
        batches = slice(heads.start // self.heads_kv, (heads.stop - 1) // self.heads_kv + 1)
        at = index(rows)
        low, high = self._row_bounds
        return low[batches][:, at], high[batches][:, at]

    def seen(self, heads: slice, rows: Positions) -> slice:
        """A range of keys; none of the rows sees a key outside it."""
        return _seen(*self.bounds(heads, rows))

    def blocks(
        self, rows: Positions, keys: Positions, block_q: Size, block_kv: Size
    ) -> Iterator[Block]:
        """Blocks of the chosen rows, each with the tiles of chosen keys that at least one of its
        rows can see."""
        device = self.q.device.type
        block_q, block_kv = (
            block_q or max(_ROWS[device] // self.group, 1),
            block_kv or _COLUMNS[device],
        )
        count = _ROWS[device] // max(self.group * min(block_q, len(rows)), 1)
        loaded = LOADED[device] // (block_kv * (self.k.shape[-1] + self.v.shape[-1]))
        whole = len(self.intervals) == len(self.attention.mask.atoms)
        pieces = [(piece, keys[piece], *ends(keys[piece])) for piece in slices(len(keys), block_kv)]
        for heads in slices(self.total, max(min(count, loaded), 1)):
            for part in slices(len(rows), block_q):
                low, high = self.bounds(heads, rows[part])
                uncut = (
                    slice(int(low.max()), int(high.min())) if whole else slice(self.seqlen_kv, 0)
                )
                seen = _seen(low, high)
                tiles = [
                    Tile(
                        self,
                        heads,
                        rows[part],
                        columns,
                        at,
                        first < uncut.start or last >= uncut.stop,
                    )
                    for columns, at, first, last in pieces
                    if first < seen.stop and last >= seen.start
                ]
                yield heads, rows[part], part, tiles


def _seen(low: Tensor, high: Tensor) -> slice:
    """From the first to the last key of any of the intervals [low, high)."""
    some = low < high
    first = int(torch.where(some, low, torch.iinfo(low.dtype).max).min())
    end = int(torch.where(some, high, 0).max())
    return slice(first, end) if first < end else slice(0, 0)
