"""Judge O by the numbers that P is once it is rounded, and by its own last rounding
(docs/tolerance.md, *Known roundings*)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.evidence import Finding
from verify.judging.findings import place, worst
from verify.judging.lattice import Explained, explained, explanations
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.tolerance.arithmetic import TINY, U
from verify.tolerance.forward_log_sum import LOG2_ROUNDINGS
from verify.tolerance.forward_maxima import tiles
from verify.tolerance.intervals import Interval
from verify.variant import Config, Numerics


def explained_out(truth: Truth, got: Tensor, output: DType, cases: int) -> list[Explained] | None:
    """What O needs, raw as the kernel wrote it, in each of so many cases that are stacked along the
    batch; None where no order of keys is declared, or O has no elements."""
    if truth.interval is None or not got.numel():
        return None
    return explanations(got, truth.interval, output, cases, truth.empty[..., None])


def judge_out(
    trial: Trial, got: Tensor, own: Explained | None
) -> tuple[Finding | None, dict[str, float]]:
    """The finding against O, raw as the kernel wrote it, and its measures: `lattice_out`, the
    largest part that an element needs of how far it may lie from the middle; `single_out`, of the
    elements that are asked, the share for which one stored number alone is accepted.

    own: what O needs under the declaration itself; None for a function that declares no order of
    keys.  A declaration says what a kernel rounds at most, and a tile may have fewer rows than the
    config says; but all elements must be explained by one declaration.
    """
    if own is None:
        return None, {}
    output, found = trial.problem.format_out, own.measures("out")
    if own.largest <= 1:
        return None, found
    for numerics, config in finer(trial.declaration.numerics, trial.config, trial.problem.dtype):
        least = float(needed(trial.truth_under(numerics, config), got, output).max())
        found["lattice_out"] = min(found["lattice_out"], least)
        if least <= 1:
            return None, found
    span = trial.known_truth.interval
    assert span is not None
    return _finding(got, span, own.ratio), found


def explained_lse(truth: Truth, got: Tensor, base2: bool, cases: int) -> list[Explained] | None:
    """The same of the LSE, raw as the kernel wrote it; None where its last steps are not
    declared."""
    span = _lse_span(truth, base2)
    if span is None or not got.numel():
        return None
    return explanations(got, span, dtype_named("float32"), cases)


def judge_lse(
    trial: Trial, got: Tensor, own: Explained | None
) -> tuple[Finding | None, dict[str, float]]:
    """The same of the LSE, raw as the kernel wrote it, whose last steps are declared
    (docs/tolerance.md, *LSE*): `lattice_lse` and `single_lse`."""
    if own is None:
        return None, {}
    found, ratio = own.measures("lse"), own.ratio
    if own.largest <= 1:
        return None, found
    span = _lse_span(trial.truth, trial.declaration.contract.lse == "base2")
    assert span is not None
    index = worst(ratio)
    value, exact, most = float(got[index]), float(span.middle[index]), float(span.reach[index])
    finding = Finding(
        oracle="bound",
        message=(
            f"lse is no rounding of ln 2 (m + log2 l), or of m + log2 l: got {value:.9g}, should be"
            f" {exact:.9g} to within {most:.4g} before its last rounding at"
            f" {place('lse', index)} (needs {float(ratio[index]):.3g} times that);"
            f" {int((ratio > 1).sum())} of {ratio.numel()} elements are so"
        ),
        got=value,
        bound=most,
        where=place("lse", index),
        count=int((ratio > 1).sum()),
        total=ratio.numel(),
    )
    return finding, found


def _lse_span(truth: Truth, base2: bool) -> Interval | None:
    """Where the LSE lies before its last rounding, if its last steps are declared."""
    if truth.lse_reach is None:
        return None
    lse = truth.lse.nan_to_num(neginf=0.0)
    return Interval(*(base2_reach if base2 else natural_reach)(lse, truth.lse_reach))


def natural_reach(lse: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Where ln 2 (m + log2 l) lies before the product is rounded, of a sum that is rounded and a
    constant that is; reach: what the LSE may be off before, both fp64."""
    return lse, reach + U * (LOG2_ROUNDINGS - 1) * (lse.abs() + reach) + TINY


def base2_reach(lse: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Where m + log2 l lies before the sum is rounded, in units of log2."""
    return lse / math.log(2), reach / math.log(2) + TINY


def finer(declared: Numerics, config: Config, dtype: str) -> Iterator[tuple[Numerics, Config]]:
    """Declarations of which each rounds no more, one after the other, with their configs: P in
    fp32, and smaller tiles of rows where the order of keys depends on them."""
    output = declared.output
    rounds = (dtype if output.probability == "input" else output.probability) != "float32"
    kept = replace(declared, output=replace(output, probability="float32"))
    if declared.products.accumulator == "float16":  # which no products of fp32 have
        kept = replace(kept, products=replace(declared.products, accumulator="float32"))
    order, rows = declared.softmax.maximum.key_order, config.block_m
    sizes: list[int] | list[None] = [None] if rows is None else tiles(rows, order)
    choices = itertools.product((declared, kept)[: 1 + rounds], sizes)
    next(choices)  # the declaration itself
    for numerics, size in choices:
        yield numerics, replace(config, block_m=size)


def needed(truth: Truth, got: Tensor, output: DType) -> Tensor:
    """What each element of O needs of how far it may lie from the middle, at most 1 where it is
    right; 0 in rows without a key, and where no order of keys is declared."""
    if truth.interval is None:
        return torch.zeros(got.shape, dtype=torch.float64)
    ratio = explained(got, truth.interval.middle, truth.interval.reach, output)
    empty = truth.empty
    return ratio.masked_fill_(empty[..., None], 0.0) if bool(empty.any()) else ratio


def _finding(got: Tensor, own: Interval, ratio: Tensor) -> Finding:
    """Against the element that is worst under the declaration itself."""
    index = worst(ratio)
    value, middle, reach = float(got[index]), float(own.middle[index]), float(own.reach[index])
    count = int((ratio > 1).sum())
    return Finding(
        oracle="bound",
        message=(
            "out is no rounding of what P V gives with P rounded, to nearest, relative to the"
            f" maximum that the declared order of keys gives, or left in fp32: got {value:.9g},"
            f" should be {middle:.9g} to within {reach:.4g} before it is rounded at"
            f" {place('out', index)} (needs {float(ratio[index]):.3g} times that); {count} of"
            f" {ratio.numel()} elements are so"
        ),
        got=value,
        bound=reach,
        where=place("out", index),
        count=count,
        total=ratio.numel(),
    )
