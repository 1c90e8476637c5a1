"""A raw tensor against its truth and bound, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.evidence import Finding
from verify.judging.findings import place

SAMPLED = 1 << 13  # elements of which percentiles are taken


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


def ulps(
    name: str, error: Tensor, truth: tuple[Tensor, Tensor], rows: Tensor, output: DType
) -> dict[str, float]:
    """Median and 99th percentile of the errors of one tensor in ulp, and of those of its correctly
    rounded truth: ulp50, ulp99, best50 and best99, by the tensor's name; nothing if no element is
    judged.

    error, and the truth with its bound: (..., rows, features), fp64; rows: those that count, bool.
    An ulp is the spacing of `output` at the element, or at the row's root mean square where that is
    larger: where terms cancel, a small element holds the rounding errors of its row, and says
    nothing more.  Of more than SAMPLED elements, some rows are taken, evenly.
    """
    found = rows.flatten().nonzero()[:, 0]
    # an odd step: an even one can meet the same places of every head
    found = found[:: len(found) * error.shape[-1] // SAMPLED | 1]
    error, want, bound = (part.flatten(0, -2)[found] for part in (error, *truth))
    judged = want.isfinite() & bound.isfinite()
    if not bool(judged.any()):
        return {}
    place = _spacing(want, output)
    size = torch.where(judged, want, 0.0).square().mean(-1, keepdim=True).sqrt()
    unit = torch.maximum(place, _spacing(size, output))
    measures = {}
    for key, off in (("ulp", error), ("best", (want / place).round() * place - want)):
        sizes = (off.abs() / unit)[judged].nan_to_num(nan=torch.inf).numpy()
        for level in (50, 99):
            at = (level * len(sizes) - 1) // 100
            measures[f"{key}{level}_{name}"] = float(np.partition(sizes, at)[at])
    return measures


def _spacing(size: Tensor, output: DType) -> Tensor:
    """Between neighbours of that format around each magnitude, fp64."""
    exponent = torch.frexp(size.abs().clamp(min=2.0**output.emin)).exponent
    return torch.exp2((exponent - output.precision).double())


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
