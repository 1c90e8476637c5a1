"""Chosen positions along a sequence, the elements there, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Choice = Tensor | slice | None  # positions along one dimension; None: all of them
Positions = range | Tensor

# elements of keys and values (or of inputs being measured) in fp64 at once
LOADED = {"cpu": 2**21, "cuda": 2**25}


def positions(choice: Choice, length: int, name: str) -> Positions:
    """The chosen positions out of `length`: a range for a slice or None, which is cheap to cut;
    else int64 on the CPU. Raises ValueError."""
    if choice is None or isinstance(choice, slice):
        return range(length)[choice or slice(None)]
    chosen, integers = (
        choice.to("cpu", torch.int64),
        choice.dtype != torch.bool and not choice.is_floating_point(),
    )
    if choice.ndim != 1 or not integers or bool(((chosen < 0) | (chosen >= length)).any()):
        raise ValueError(
            f"{name}: give a slice, or integer positions in 0..{length - 1} in a one-dimensional"
            " tensor"
        )
    return chosen


def tensor(p: Positions, device: torch.device | str = "cpu") -> Tensor:
    """Positions as int64, (n,)."""
    return (
        p.to(device)
        if isinstance(p, Tensor)
        else torch.arange(p.start, p.stop, p.step, device=device)
    )


def index(p: Positions) -> slice | Tensor:
    """What selects these positions of a tensor's dimension; a slice, if it can, copies nothing."""
    if isinstance(p, range) and p.step == 1:
        return slice(p.start, p.stop)
    return tensor(p)


def ends(p: Positions) -> tuple[int, int]:
    """The least and the largest position; there is at least one."""
    if isinstance(p, range):
        return min(p[0], p[-1]), max(p[0], p[-1])
    least, most = p.aminmax()
    return int(least), int(most)


def slices(length: int, step: int) -> Iterator[slice]:
    """Slices of `step` that cover `length`; the last one can be shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def take(x: Tensor, at: Positions) -> Tensor:
    """x (..., seqlen, d) at these positions, in fp64."""
    chosen = index(at)
    if isinstance(chosen, slice):
        return x[..., chosen, :].to(torch.float64)
    return x.index_select(-2, chosen.to(x.device)).to(torch.float64)


def largest_norms(*tensors: Tensor) -> list[float]:
    """The largest Euclidean norm over the last dimension of each; NaN or inf if an element is, or
    if the norm overflows."""
    # brought from the device together: it is waited for once
    return torch.stack([_largest_norm(x) for x in tensors]).tolist()


def _largest_norm(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    step = max(LOADED[x.device.type] * x.shape[-2] // x.numel(), 1)
    parts = [
        torch.linalg.vector_norm(x[..., part, :].to(torch.float64), dim=-1).amax()
        for part in slices(x.shape[-2], step)
    ]
    return torch.stack(parts).amax()


@dataclass(frozen=True, eq=False)
class Sizes:
    """The least |x| that is not 0 (+inf if there is none) and the largest (0 if there is none),
    without NaN and infinities."""

    least: Tensor
    most: Tensor

    @staticmethod
    def of(x: Tensor, dim: int) -> Sizes:
        """The sizes along one dimension, which stays with length 1."""
        if not x.shape[dim]:
            shape = [1 if n == dim % x.ndim else length for n, length in enumerate(x.shape)]
            return Sizes(x.new_full(shape, torch.inf), x.new_zeros(shape))
        size = x.abs().nan_to_num_(nan=0.0, posinf=0.0)
        most = size.amax(dim, keepdim=True)
        return Sizes(size.masked_fill_(size == 0, torch.inf).amin(dim, keepdim=True), most)

    def repeated(self, times: int) -> Sizes:
        """Each entry of the first dimension, repeated that often."""
        if times == 1:
            return self
        return Sizes(*(x.repeat_interleave(times, 0) for x in (self.least, self.most)))

    def cut(self, *index: slice) -> Sizes:
        """Both tensors at the same index."""
        return Sizes(self.least[index], self.most[index])
