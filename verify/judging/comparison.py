"""Compare a raw tensor with its truth and bound, element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import cast, power_of_two
from verify.evidence import Finding
from verify.judging.findings import place, worst
from verify.tolerance.extremes import below

SAMPLED = 1 << 13  # elements from which percentiles are computed


@dataclass(frozen=True)
class Comparison:
    """Errors of one tensor and ratios r = error / bound, elementwise; r is inf for a NaN or an
    infinity that is out of place."""

    error: Tensor
    ratio: Tensor

    @property
    def worst(self) -> float:
        return float(self.ratio.max()) if self.ratio.numel() else 0.0

    def among(self, judged: Tensor) -> Comparison:
        """The same, with 0 where an element is not judged; bool, broadcastable to the elements."""
        if bool(judged.all()):
            return self
        return Comparison(*(torch.where(judged, x, 0.0) for x in (self.error, self.ratio)))


def compare(got: Tensor, want: Tensor, bound: Tensor, output: DType) -> Comparison:
    """Compare raw output (any dtype) with fp64 truth.  An infinity is right if truth plus or minus
    bound reaches overflow, and never in 8 bits."""
    value = got.double()
    error = (value - want).abs_()
    if below(error, torch.inf) and below(bound, torch.inf):
        return Comparison(error, (error / bound).nan_to_num_(nan=0.0, posinf=torch.inf))
    # Either infinity can be right, whatever the truth's sign: if a sum cancels, its error can be
    # larger than the sum.
    overflowed = (value == torch.inf) & (want + bound >= output.overflow)
    overflowed |= (value == -torch.inf) & (want - bound <= -output.overflow)
    overflowed &= output.itemsize > 1  # O in 8 bits saturates
    overflowed |= bound == torch.inf  # outside the declared arithmetic: any value passes
    error = torch.where(overflowed, 0.0, error)
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(value.isfinite() | overflowed, ratio, torch.inf)
    return Comparison(error, ratio)


def summary(name: str, compared: Comparison, want: Tensor, bound: Tensor) -> dict[str, float]:
    """The measures of one tensor that a report shows, named after the tensor: worst r and its
    place, the largest error and its bound, and the share of elements whose bound is infinite."""
    return summaries(name, compared, want, bound, 1)[0]


def summaries(
    name: str, compared: Comparison, want: Tensor, bound: Tensor, cases: int
) -> list[dict[str, float]]:
    """`summary` of each of so many cases whose tensors are stacked along the batch."""
    if not want.numel():
        return [{f"r_{name}": 0.0} for _ in range(cases)]
    error, ratio, want, bound = (
        x.reshape(cases, -1) for x in (compared.error, compared.ratio, want, bound)
    )
    known = error if below(error, torch.inf) else error.nan_to_num(nan=torch.inf)
    largest, worst_ones = first_largest(known), first_largest(ratio)
    if below(bound, torch.inf):
        unasked = torch.zeros_like(error[:, :1])
    else:
        unasked = (bound == torch.inf).double().mean(1, keepdim=True)
    found = {
        "r": ratio.gather(1, worst_ones),
        "max_error": error.gather(1, largest),
        "error_bound": bound.gather(1, largest),
        "worst_index": worst_ones.double(),
        "worst_reference": want.gather(1, worst_ones),
        "worst_bound": bound.gather(1, worst_ones),
        "unasked": unasked,
    }
    names = [f"{key}_{name}" for key in found]
    rows = torch.cat(list(found.values()), 1).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def first_largest(x: Tensor) -> Tensor:
    """Where the first largest element is along the last dimension, which stays with length 1; a NaN
    is the largest."""
    if x.device.type != "cpu":
        return x.argmax(-1, keepdim=True)
    return torch.from_numpy(x.numpy().argmax(-1))[..., None]  # several times as fast as torch's


def ulps(
    name: str, error: Tensor, truth: tuple[Tensor, Tensor], rows: Tensor, output: DType
) -> dict[str, float]:
    """Median and 99th percentile of the errors of one tensor in ulp: ulp50 and ulp99, named after
    the tensor.

    best50 and best99 are those of the correctly rounded truth.  Empty if no element is judged.
    error, and the truth with its bound: (..., rows, features), fp64; rows: those that count, bool.
    An ulp is the spacing of `output` at the element, or at the row's root mean square if that is
    larger: where terms cancel, a small element shows only the rounding errors of its row.  From
    more than SAMPLED elements, rows are sampled evenly.
    """
    return ulps_of(name, error, truth, rows, output, 1)[0]


def ulps_of(
    name: str,
    error: Tensor,
    truth: tuple[Tensor, Tensor],
    rows: Tensor,
    output: DType,
    cases: int,
) -> list[dict[str, float]]:
    """`ulps` of each of so many cases whose tensors are stacked along the first dimension."""
    if not error.numel():
        return [{} for _ in range(cases)]
    counted = rows.reshape(cases, -1)
    parts = [x.reshape(*counted.shape, -1) for x in (error, *truth)]
    if bool((counted == counted[0]).all()):
        return _ulps(name, parts, counted[0].nonzero()[:, 0], output)
    own = [[part[n : n + 1] for part in parts] for n in range(cases)]
    return [
        _ulps(name, each, counts.nonzero()[:, 0], output)[0]
        for each, counts in zip(own, counted, strict=True)
    ]


def _ulps(
    name: str, parts: Sequence[Tensor], found: Tensor, output: DType
) -> list[dict[str, float]]:
    """`ulps` of several cases in which the same rows count, at these positions, int64.

    parts: error, and the truth with its bound, (cases, rows, features).
    """
    # an odd step: an even one can select the same positions in every head
    found = found[:: len(found) * parts[0].shape[-1] // SAMPLED | 1]
    error, want, bound = (part[:, found] for part in parts)
    judged = want.isfinite() & bound.isfinite()
    every = bool(judged.all())
    place = spacing(want, output)
    size = (want if every else torch.where(judged, want, 0.0)).square().mean(-1, keepdim=True)
    unit = torch.maximum(place, spacing(size.sqrt_(), output))
    errors = {"ulp": error, "best": (want / place).round() * place - want}
    sizes = {key: off.abs().div_(unit) for key, off in errors.items()}
    if every:
        return _percentiles(name, {key: of_all.flatten(1) for key, of_all in sizes.items()})
    return [
        _percentiles(name, {key: of_all[case][counts][None] for key, of_all in sizes.items()})[0]
        for case, counts in enumerate(judged)
    ]


def _percentiles(name: str, sizes: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Median and 99th percentile of each row of numbers (cases, n), by the word before "50" and
    "99"; none of rows without numbers."""
    found: list[dict[str, float]] = [{} for _ in next(iter(sizes.values()))]
    for key, of_all in sizes.items():
        values = of_all.nan_to_num(nan=torch.inf).numpy()
        if not values.shape[1]:
            continue
        half, most = ((level * values.shape[1] - 1) // 100 for level in (50, 99))
        # one place at a time: numpy looks for several by slower means
        below_most = np.partition(values, most)[:, : most + 1]
        medians = np.partition(below_most, half)[:, half].tolist()
        for own, median, largest in zip(found, medians, below_most[:, most].tolist(), strict=True):
            own |= {f"{key}50_{name}": median, f"{key}99_{name}": largest}
    return found


def spacing(size: Tensor, output: DType) -> Tensor:
    """The distance between neighbours in that format around each magnitude, fp64."""
    exponent = torch.frexp(size.abs().clamp_(min=2.0**output.emin)).exponent
    return power_of_two(exponent - output.precision)


def quantisation(
    name: str, error: Tensor, want: Tensor, rows: Tensor, output: DType
) -> dict[str, float]:
    """What an output in 8 bits loses, apart from what a kernel does to it, named after the tensor.

    As parts of the root mean square of `want`, which is what the output approximates (fp64): rms,
    that of the kernel's errors; rounded, that of the exact result's own rounding.  saturated: the
    share of elements that are the format's largest.  Empty if no row counts, or all are 0.
    error, want: (..., rows, features); rows: those that count, bool.
    """
    error, want = (part[rows].nan_to_num(nan=torch.inf) for part in (error, want))
    size = float(want.square().mean().sqrt()) if want.numel() else 0.0
    if not size:
        return {}
    lost = cast(want.numpy(), output).double() - want
    return {
        f"rms_{name}": float(error.square().mean().sqrt()) / size,
        f"rounded_{name}": float(lost.square().mean().sqrt()) / size,
        f"saturated_{name}": float((want.abs() >= output.max).double().mean()),
    }


def excess(
    oracle: str, name: str, got: Tensor, want: Tensor, bound: Tensor, compared: Comparison
) -> Finding | None:
    """The finding against the element with the greatest r, if any r exceeds 1."""
    if not compared.ratio.numel() or bool(compared.ratio.amax() <= 1):
        return None
    bad = ~(compared.ratio <= 1)
    count = int(bad.sum())
    index = worst(compared.ratio)
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
