"""A raw tensor against its truth and bound, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.evidence import Finding
from verify.judging.findings import place


@dataclass(frozen=True)
class Comparison:
    """One tensor against its truth: error and ratio r = error / bound, elementwise (r = inf: NaN or
    Inf out of place)."""

    error: Tensor
    ratio: Tensor

    @property
    def worst(self) -> float:
        return float(self.ratio.max()) if self.ratio.numel() else 0.0


def compare(got: Tensor, want: Tensor, bound: Tensor, output: DType) -> Comparison:
    """Compare raw output (any dtype) with fp64 truth.  An infinity is right where truth and bound
    reach past overflow."""
    value = got.double()
    error = (value - want).abs()
    # On either side of 0, whatever the truth's own sign: sums that cancel may be further off than
    # they are large.
    overflowed = (value == torch.inf) & (want + bound >= output.overflow)
    overflowed |= (value == -torch.inf) & (want - bound <= -output.overflow)
    overflowed |= bound == torch.inf  # outside the declared arithmetic: anything goes
    error = torch.where(overflowed, 0.0, error)
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(value.isfinite() | overflowed, ratio, torch.inf)
    return Comparison(error, ratio)


def summary(name: str, compared: Comparison, want: Tensor, bound: Tensor) -> dict[str, float]:
    """What a report needs of one tensor: worst r and where, largest error and its bound, the share
    of elements that nothing is asked of; by the tensor's name."""
    found = {f"r_{name}": compared.worst}
    if compared.error.numel():
        at = int(compared.error.nan_to_num(nan=torch.inf).argmax())
        found |= {
            f"max_error_{name}": float(compared.error.flatten()[at]),
            f"error_bound_{name}": float(bound.flatten()[at]),
        }
        at = int(compared.ratio.argmax())
        found |= {
            f"worst_index_{name}": float(at),
            f"worst_reference_{name}": float(want.flatten()[at]),
        }
        found[f"worst_bound_{name}"] = float(bound.flatten()[at])
        found[f"unasked_{name}"] = float((bound == torch.inf).double().mean())
    return found


def excess(
    oracle: str, name: str, got: Tensor, want: Tensor, bound: Tensor, compared: Comparison
) -> Finding | None:
    """The finding against the element with the greatest r, if any r exceeds 1."""
    bad = ~(compared.ratio <= 1)
    count = int(bad.sum())
    if not count:
        return None
    at = int(compared.ratio.nan_to_num(nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), compared.ratio.shape))
    value, truth, limit = float(got[index]), float(want[index]), float(bound[index])
    ratio = float(compared.ratio[index])
    message = (
        f"{name} is off by {abs(value - truth):.4g}, the bound is {limit:.4g} (r = {ratio:.3g}):"
        f" got {value:.9g}, should be {truth:.9g} at {place(name, index)}; {count} of {bad.numel()}"
        " elements are out of bounds"
    )
    return Finding(
        oracle=oracle,
        message=message,
        got=value,
        bound=limit,
        where=place(name, index),
        count=count,
        total=bad.numel(),
    )
