"""Averages of V: how far a softmax whose weights are moved can move O, without the (rows, keys,
head_dim_v) tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.tolerance.scratch import room_on

U64 = 2.0**-53
_TOP = 4  # keys per row whose share of the Jacobian term is taken exactly
_BLOCK = 64  # keys of which the heaviest is found first


@dataclass(frozen=True, eq=False)
class Values:
    """V of some heads, and what sums over it need: made once for a block of rows, cut with its rows
    and keys.

    values, size: V and |V|, (heads, keys, head_dim_v); most: the largest |V|, spread: max V - min V
    over the keys that some row sees, centre: the mean, all (heads, 1, head_dim_v); around: V -
    centre, its size and its square, and |V| side by side, (heads, keys, 4 head_dim_v), without
    columns where there are too few keys to need them.
    """

    values: Tensor
    size: Tensor
    most: Tensor
    spread: Tensor
    centre: Tensor
    around: Tensor

    @staticmethod
    def of(block: RowBlock, full: bool) -> Values:
        """full: every row sees every key."""
        values = block.values
        size, centre = values.abs(), values.mean(1, keepdim=True)
        if values.shape[1]:
            most, (low, high) = size.amax(1, keepdim=True), values.aminmax(dim=1, keepdim=True)
        else:
            most = low = high = values.new_zeros(len(values), 1, values.shape[2])
        if not full and values.shape[1]:
            unseen = ~block.visible.any(-2)[..., None]
            high = values.masked_fill(unseen, -torch.inf).amax(1, keepdim=True)
            low = values.masked_fill(unseen, torch.inf).amin(1, keepdim=True)
        few, width = values.shape[1] <= _TOP, values.shape[2]
        around = values[..., :0]
        if not few:
            room = room_on(values.device, "values")
            room.clear(values, *values.shape[:2], 4 * width)
            around = room.take()
            shifted = torch.sub(values, centre, out=around[..., :width])
            torch.abs(shifted, out=around[..., width : 2 * width])
            torch.mul(shifted, shifted, out=around[..., 2 * width : 3 * width])
            around[..., 3 * width :] = size
        return Values(values, size, most, (high - low).clamp(min=0.0), centre, around)

    def cut(self, heads: slice, keys: slice) -> Values:
        """Of some heads and keys."""
        parts = (x[heads, keys] for x in (self.values, self.size, self.around))
        rows = (x[heads] for x in (self.most, self.spread, self.centre))
        (values, size, around), (most, spread, centre) = parts, rows
        return Values(values, size, most, spread, centre, around)

    def deviation(self, weights: Tensor, out: Tensor) -> Tensor:
        """An upper bound of sum_j w_j |V_j - O|, elementwise: (heads, rows, head_dim_v).  The
        heaviest weights are lost.

        The heaviest keys are taken exactly; the rest by the least of three matrix forms: |V| + |O|,
        centred at the mean of V, and Cauchy-Schwarz.  Every pure matrix form fails on peaked rows,
        where the heavy key has V close to O.
        """
        keys = self.values.shape[1]
        if keys == 0:
            return torch.zeros_like(out)
        heavy, index = heaviest(weights, min(_TOP, keys))
        heads = torch.arange(len(out), device=out.device).mul_(keys)[:, None, None]
        chosen = self.values.reshape(-1, out.shape[-1]).index_select(0, (index + heads).flatten())
        chosen = chosen.view(*index.shape, -1).sub_(out[..., None, :]).abs_()
        exact = chosen.mul_(heavy[..., None]).sum(-2)
        if keys <= _TOP:
            return exact
        rest = weights.scatter_(-1, index, 0.0)
        sums = torch.bmm(rest, self.around)
        first, centred, second, plain = sums.view(*sums.shape[:-1], 4, -1).unbind(-2)
        total, target = rest.sum(-1, keepdim=True), out - self.centre
        # The variance around O cancels: what the fp64 sums may have lost is added, at most (keys +
        # 4) u of twice its parts.
        around = target.square().mul_(total)
        spread = torch.addcmul(second, target, first, value=-2).add_(around)
        spread.add_(second.add(around), alpha=2 * (keys + 4) * U64)
        schwarz = (
            spread.clamp_(min=0.0).mul_(total).sqrt_().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        )
        forms = torch.minimum(
            torch.addcmul(plain, out.abs(), total), torch.addcmul(centred, target.abs_(), total)
        )
        return exact.add_(torch.minimum(forms, schwarz))


def heaviest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest along the last dimension, and where: looked for in the blocks whose
    largest are largest."""
    *rows, keys = weights.shape
    if keys % _BLOCK or keys < 4 * count * _BLOCK:
        return weights.topk(count, -1)
    blocks = weights.view(*rows, keys // _BLOCK, _BLOCK).amax(-1).topk(count, -1).indices
    places = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)).flatten(-2)
    found, index = weights.gather(-1, places).topk(count, -1)
    return found, places.gather(-1, index)
