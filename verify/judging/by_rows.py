"""Row-wise computations of long tensors, a few rows at a time: what they make beside their result
stays in a core's cache, and no whole tensor is copied in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from references.positions import Sizes, slices
from verify.problem import Problem

# Elements of the largest tensor that are computed at once.
_PART = 1 << 16


def by_rows(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What `compute` makes of tensors whose first three dimensions are the same, (batch, heads,
    rows, ...).

    It is called with these dimensions, or, of tensors that are long, with one of them and some of
    the rows.  A row of its result depends on nothing but that row of the tensors.
    """
    size = max(tensor.numel() for tensor in tensors)
    if size <= 2 * _PART:
        return compute(*tensors)
    leading = tensors[0].shape[:3]
    flat = [tensor.flatten(0, 2) for tensor in tensors]
    step = max(_PART * len(flat[0]) // size, 1)
    parts = slices(len(flat[0]), step)
    found = torch.cat([compute(*(tensor[part] for tensor in flat)) for part in parts])
    return found.view(*leading, *found.shape[1:])


def norms(x: Tensor) -> Tensor:
    """The Euclidean norms over the last dimension, fp64."""
    return by_rows(lambda part: part.double().norm(dim=-1), x)


def sizes(x: Tensor) -> Sizes:
    """`Sizes` over the last dimension, fp64."""

    def both(part: Tensor) -> Tensor:
        found = Sizes.of(part if part.itemsize > 4 else part.float(), -1)
        return torch.cat((found.least, found.most), -1).double()

    found = by_rows(both, x)
    return Sizes(found[..., :1], found[..., 1:])


def key_rows(p: Problem, keys: Tensor) -> Tensor:
    """Where the row of each key is among all rows of K or V, (batch * heads_kv * seqlen_kv, dim):
    int64, shaped like `keys`, (batch, heads_q, seqlen_q); of key 0 where there is none (-1)."""
    heads = torch.arange(p.batch * p.heads_q).view(p.batch, p.heads_q, 1) // p.group
    return heads * p.seqlen_kv + keys.clamp(min=0)


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if x.itemsize == 1 or not x.numel():  # torch neither compares nor classifies 8-bit floats
        return bool(x.float().isfinite().all())
    least, most = x.aminmax()  # NaN if one is
    return bool(least.isfinite()) and bool(most.isfinite())
