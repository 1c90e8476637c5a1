"""The maximum that each block of keys is relative to, where the order of blocks is declared.

The derivation is docs/tolerance.md, *Known roundings*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.problem import Problem
from verify.problem.visibility import intervals
from verify.tolerance.arithmetic import ForwardArithmetic

FEWEST_ROWS = 16  # of a tile: those of a matrix instruction


@dataclass(frozen=True, eq=False)
class Maxima:
    """By block of keys, fp64 (heads, rows, blocks).

    used: the exact maximum of the scores so far, of its part if keys are split, that P is relative
    to; the row's own where no key
    of the block, nor of one before, is visible.  unknown: where P can be relative to another one;
    None where it nowhere can.
    """

    used: Tensor
    unknown: Tensor | None


def maxima_of(block: RowBlock, a: ForwardArithmetic, problem: Problem, error: Tensor) -> Maxima:
    """The maxima of a block's rows.  error: the largest error of a score, (heads, rows, 1)."""
    own = block_maxima(block.scores, a.block_n, block.keys.start)
    high = _running(own, block, _settled(a, own, problem), problem)
    if high is None:  # of the block's keys at least, or so far behind, and of all keys at most
        low, high = own - a.lag, block.row_max[..., None].expand_as(own)
    else:
        low = _lagging(high, a, error) if a.lag else high
    used = torch.where(high == -torch.inf, block.row_max[..., None], high)
    unknown = (low < high) & (own != -torch.inf)
    return Maxima(used, unknown if bool(unknown.any()) else None)


def rescaling_blocks(
    block: RowBlock, a: ForwardArithmetic, problem: Problem, error: Tensor
) -> Tensor | None:
    """How many blocks may change the maximum of a row, the first one included, fp64 (heads, rows,
    1); None where the order is not known.  error: as in `maxima_of`."""
    own = block_maxima(block.scores, a.block_n, block.keys.start)
    most = torch.ones_like(error)
    a = _settled(a, own, problem)
    for tile in [a.tile] if a.merged else tiles(a.tile, a.key_order):
        high = _running(own, block, replace(a, tile=tile), problem)
        if high is None:
            return None
        new = (own >= high - 2 * error) & (own != -torch.inf)
        most = torch.maximum(most, new.sum(-1, keepdim=True))
    return most


def tiles(rows: int, key_order: str) -> list[int]:
    """Sizes that a tile of at most so many rows can have, where that order of keys depends on
    it."""
    found = [rows]
    while key_order == "whole_first" and found[-1] // 2 >= FEWEST_ROWS:
        found.append(found[-1] // 2)
    return found


def block_maxima(scores: Tensor, size: int, first: int = 0) -> Tensor:
    """The largest score of each block of `size` keys (0: all), (heads, rows, blocks); one block at
    least.

    first: the position of the first key, a multiple of `size`.
    """
    keys = scores.shape[-1]
    if not keys:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if not size or keys <= size:
        return scores.amax(-1, keepdim=True)
    assert first % size == 0, (first, size)
    whole = keys // size
    parts = [scores.unfold(-1, size, size).amax(-1)]
    if keys % size:
        parts.append(scores[..., whole * size :].amax(-1, keepdim=True))
    return torch.cat(parts, -1)


def scale_blocks(pairs: Tensor, factors: Tensor, size: int, out: Tensor) -> Tensor:
    """Pairs (heads, rows, keys) times a factor for each block of keys, or one for all, in `out`."""
    keys = pairs.shape[-1]
    if not size or keys <= size or factors.shape[-1] == 1:
        return torch.mul(pairs, factors, out=out)
    whole = keys // size
    blocks, made = pairs.unfold(-1, size, size), out.unfold(-1, size, size)
    torch.mul(blocks, factors[..., :whole, None], out=made)
    if keys % size:
        rest = slice(whole * size, None)
        torch.mul(pairs[..., rest], factors[..., whole:], out=out[..., rest])
    return out


def _running(own: Tensor, block: RowBlock, a: ForwardArithmetic, problem: Problem) -> Tensor | None:
    """The largest score of each block and those before it; None where that is not known."""
    if a.merged:
        return _of_parts(own, block, a, problem)
    if a.key_order != "whole_first":
        return _in_order(own, a.key_order)
    inside = whole_blocks(problem, a, block)
    if inside is None or (a.lag and bool(inside.any())):
        return None
    return _in_order(own, a.key_order, inside)


def _settled(a: ForwardArithmetic, own: Tensor, problem: Problem) -> ForwardArithmetic:
    """The arithmetic, its blocks in ascending order where no tile decides on it: if there is one
    block, or if every row sees the first key.  Whole blocks come first then, anyhow."""
    if a.merged or a.key_order != "whole_first":
        return a
    if own.shape[-1] > 1:
        bounds = intervals(problem)
        if bounds is None or bool((bounds[0][bounds[0] < bounds[1]] > 0).any()):
            return a
    return replace(a, key_order="ascending")


def _in_order(own: Tensor, order: str, inside: Tensor | None = None) -> Tensor:
    """The running maxima of successive blocks; inside: those that come first, if any do."""
    if order == "descending":
        return own.flip(-1).cummax(-1).values.flip(-1)
    if inside is None:
        return own.cummax(-1).values
    first = own.masked_fill(~inside, -torch.inf).cummax(-1).values
    last = own.masked_fill(inside, -torch.inf).cummax(-1).values
    return torch.where(inside, first, torch.maximum(last, first[..., -1:]))


def _of_parts(
    own: Tensor, block: RowBlock, a: ForwardArithmetic, problem: Problem
) -> Tensor | None:
    """The same, where each part of the blocks has its own maximum; None unless all rows of a
    sequence see the same blocks, and so do all tiles, whatever their rows are.  Maxima that lag are
    looked for in one chain."""
    bounds = intervals(problem)
    if bounds is None or a.lag:
        return None
    size = a.block_n or max(own.shape[-1], problem.seqlen_kv, 1)
    found = own.clone()
    heads = block.index[0].start + torch.arange(len(own))
    for batch in range(problem.batch):
        low, high = (x[batch] for x in bounds)
        here = (heads // problem.heads_q == batch).to(own.device)
        seen = low < high
        if not bool(here.any()) or not bool(seen.any()):
            continue
        begin, end = low[seen] // size, -(-high[seen] // size)
        same = bool((begin == begin[0]).all() and (end == end[0]).all())
        inside = None
        if a.key_order == "whole_first" and bool((low[seen] > 0).any()):
            same = bool((low == low[0]).all() and (high == high[0]).all())
            at = torch.arange(own.shape[-1], device=own.device) * size + block.keys.start
            inside = (at >= int(low[0])) & (at + size <= int(high[0]))
        if not same:
            return None
        shift = block.keys.start // size
        first, last = int(begin[0]) - shift, int(end[0]) - shift
        length = max(-(-(last - first) // a.key_parts), 1)
        for start in range(first, last, length):
            part = slice(max(start, 0), max(min(start + length, last), 0))
            held = None if inside is None else inside[part]
            if part.stop > part.start:
                found[here, :, part] = _in_order(own[here, :, part], a.key_order, held)
    return found


def whole_blocks(problem: Problem, a: ForwardArithmetic, block: RowBlock) -> Tensor | None:
    """Blocks that all rows of a row's tile see whole, (heads, rows, blocks); None where tiles are
    not known."""
    heads, _, keys = block.scores.shape
    size = a.block_n or max(keys, 1)
    blocks = max(-(-keys // size), 1)
    bounds = intervals(problem)
    if bounds is None or not a.tile:
        return None
    low, high = bounds
    rows = torch.arange(-(-problem.seqlen_q // a.tile) * a.tile)
    rows = rows.clamp(max=problem.seqlen_q - 1)  # those past the end see what the last one does
    low = low[:, rows].unfold(1, a.tile, a.tile).amax(-1)
    high = high[:, rows].unfold(1, a.tile, a.tile).amin(-1)
    begin = (torch.arange(blocks) * size + block.keys.start)[None, None]
    inside = (begin >= low[..., None]) & (begin + size <= high[..., None])
    heads_at = torch.arange(block.index[0].start, block.index[0].start + heads)
    chosen: Tensor = inside[heads_at // problem.heads_q][:, block.rows.cpu() // a.tile]
    return chosen.to(block.scores.device)


def _lagging(high: Tensor, a: ForwardArithmetic, error: Tensor) -> Tensor:
    """The least maximum so far that the largest score exceeds by no more than it may: the kernel
    can subtract any between that and the largest one."""
    turned = a.key_order == "descending"
    runs = high.flip(-1) if turned else high
    least = runs - (a.lag + 2 * error)
    at = torch.searchsorted(runs.contiguous(), least.contiguous())
    low = runs.gather(-1, torch.minimum(at, torch.arange(runs.shape[-1], device=runs.device)))
    return low.flip(-1) if turned else low
