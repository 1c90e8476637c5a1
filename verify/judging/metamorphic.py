"""Shared parts of the metamorphic oracles: values made from others, and comparisons of related
results.

A relation runs a kernel on two problems whose results follow from each other.  One truth serves
both: that of the first problem, transformed by the relation.  Each result must lie within its
derived bound of this truth.  So, by the triangle inequality, the results differ by at most the sum
of both bounds.  If the contract promises equal bits, bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.rounding import cast
from verify.cell.arena import bits, different
from verify.evidence import Finding
from verify.judging.comparison import compare, excess
from verify.judging.findings import Ruling, convict, first, place, worst
from verify.judging.launch import Launch
from verify.judging.run_checks import fault, held
from verify.judging.trial import Trial

# a tensor's name, its value as predicted from the first result, and the second result; raw
Pair = tuple[str, Tensor, Tensor]

_SMALLEST = torch.finfo(torch.float64).smallest_normal

# Results.


@dataclass(frozen=True)
class RelatedResult:
    """One tensor of two related results.  before: the second result as predicted from the first,
    fp64; after: the second result; truth: the exact value of both, fp64; asked: a mask of the
    compared elements over leading dimensions."""

    name: str
    before: Tensor
    before_bound: Tensor
    after: Tensor
    after_bound: Tensor
    truth: Tensor
    output: DType
    asked: Tensor | None = None


def part_bound(bound: Tensor, truth: Tensor, output: DType) -> Tensor:
    """The bound of a result that is a term of a sum: infinite if the term can overflow, even if the
    sum cannot."""
    return bound.masked_fill(truth.abs() + bound >= output.overflow, torch.inf)


def check_within_bounds(oracle: str, when: str, results: Iterable[RelatedResult]) -> Ruling:
    """Convict a result outside its bound, or two results that differ by more than the sum of their
    bounds.

    when: how the second problem differs from the first, in words.  Measures of each tensor T:
    same_bits_T, the share of equal elements, and apart_T, the largest distance over the sum of the
    bounds.
    """
    measures: dict[str, float] = {}
    finding: Finding | None = None
    for r in results:
        asked = (
            torch.ones_like(r.truth, dtype=torch.bool)
            if r.asked is None
            else spread(r.asked, r.truth)
        )
        before, after = r.before.double(), r.after.double()
        # If fp64 underflows, two computations of the same truth can differ; no kernel's format
        # holds such a value.
        truth = torch.where(asked & (r.truth.abs() >= _SMALLEST), r.truth, 0.0)
        own = compare(r.after, truth, r.after_bound, r.output)
        own = replace(own, ratio=torch.where(asked, own.ratio, 0.0))
        limit = r.before_bound + r.after_bound
        # infinities have been compared with the truth
        comparable = asked & before.isfinite() & after.isfinite()
        distance = torch.where(comparable, (before - after).abs(), 0.0)
        apart = torch.where(distance == 0, 0.0, distance / limit)
        if bool(asked.any()):
            measures[f"same_bits_{r.name}"] = float((before == after)[asked].double().mean())
            measures[f"apart_{r.name}"] = float(apart.max())
        found = excess(oracle, r.name, r.after, truth, r.after_bound, own)
        if found is None and bool((apart > 1).any()):
            at = worst(apart)
            found = convict(
                oracle,
                f"{place(r.name, at)} is {float(before[at]):.9g} by one result and"
                f" {float(after[at]):.9g} by the other; both bounds together allow"
                f" {float(limit[at]):.4g}",
                name=r.name,
                bad=apart > 1,
                got=float(after[at]),
                bound=float(limit[at]),
            ).finding
        if found is not None:
            finding = finding or replace(found, message=f"{when}: {found.message}")
    return Ruling(finding, measures)


def check_same_bits(
    oracle: str,
    when: str,
    pairs: Iterable[Pair],
    asked: Mapping[str, Tensor] | None = None,
    excused: Callable[[str], Tensor] | None = None,
) -> Ruling:
    """Convict the first of these results whose bits differ; zeros of either sign are equal.

    asked: by a tensor's name, the elements to compare.  excused: gives elements to leave out; it is
    called only for a tensor whose bits differ, because it can cost a reference.
    """
    for name, before, after in pairs:
        changed = different(before, after) & ~((before == 0) & (after == 0))
        if asked is not None:
            changed &= spread(asked[name], changed)
        if excused is not None and bool(changed.any()):
            changed &= ~spread(excused(name), changed)
        if not bool(changed.any()):
            continue
        at = first(changed)
        got, want = float(after[at]), float(before[at])
        message = (
            f"{when}: {name} should keep its bits, but {want:.9g} became {got:.9g} at"
            f" {place(name, at)}; {int(changed.sum())} of {changed.numel()} elements changed"
        )
        return convict(oracle, message, name=name, bad=changed, got=got, bound=want)
    return Ruling()


def same_bits(pairs: Iterable[Pair]) -> Ruling | None:
    """A passing ruling if all results, (name, first, second), are the same bit for bit, so that no
    reference is needed; else None."""
    found = [
        (name, torch.equal(bits(a.contiguous()), bits(b.contiguous()))) for name, a, b in pairs
    ]
    return (
        Ruling(measures={f"same_bits_{name}": 1.0 for name, _ in found})
        if all(same for _, same in found)
        else None
    )


def spread(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over leading dimensions, expanded to the shape of another tensor."""
    return mask.view(*mask.shape, *[1] * (like.dim() - mask.dim())).expand(like.shape)


def beyond_arithmetic(trial: Trial) -> Tensor:
    """Rows (batch, heads_q, seqlen_q) of a forward in which any value passes, because the declared
    arithmetic can overflow.

    If all scores of a row become -inf, a finite substitute for masked scores is larger: hidden keys
    get weight.
    """
    truth = trial.truth
    return ~(truth.out_bound.isfinite().all(-1) & truth.lse_bound.isfinite())


def failed(trial: Trial, *others: Launch) -> Ruling | None:
    """The first ruling against a run of the trial or of `others` by the checks of every run; None
    if all pass."""
    own = (ruling if ruling.finding is not None else None for _, _, ruling in held(trial))
    more = (fault(trial, run) for run in others)
    return next((ruling for ruling in chain(own, more) if ruling is not None), None)


def forward_results(
    one: Trial,
    other: Trial,
    move: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    own_bounds: bool = False,
) -> Iterator[RelatedResult]:
    """O and LSE of two forwards, without rows that see no key.

    move: transforms a tensor of the first forward (out or lse shaped) to the second.  The truth is
    transformed too, and so are the bounds, unless the second has `own_bounds`.
    """
    truth, run = one.truth, other.first
    bounds = other.truth if own_bounds else None
    assert one.first.out is not None
    assert run.out is not None
    live = ~move(truth.empty)
    own = move(truth.out_bound) if bounds is None else bounds.out_bound
    yield RelatedResult(
        "out",
        move(_computable(one.first.out)),
        move(truth.out_bound),
        _computable(run.out),
        own,
        move(truth.out),
        other.problem.format_out,
        live,
    )
    if one.first.lse is not None and run.lse is not None:
        own = move(truth.lse_bound) if bounds is None else bounds.lse_bound
        yield RelatedResult(
            "lse",
            move(one.natural_lse(one.first.lse)),
            move(truth.lse_bound),
            other.natural_lse(run.lse),
            own,
            move(truth.lse),
            dtype_named("float32"),
            live,
        )


def _computable(out: Tensor) -> Tensor:
    """O in a dtype with which torch computes: in fp64 if it is in 8 bits."""
    return out.double() if out.itemsize == 1 else out


def forward_pairs(
    one: Trial, other: Trial, move: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[Pair]:
    """The raw O and LSE of two forwards, the first moved as in `forward_results`."""
    for name, tensor in one.first.outputs.items():
        yield name, move(tensor), other.first.outputs[name]


def gradient_results(
    one: Trial, other: Trial, move: Callable[[str, Tensor], Tensor]
) -> Iterator[RelatedResult]:
    """dQ, dK and dV of two backwards.  move(name, tensor) transforms a tensor of the first to the
    second.

    If the second's forward saved other bits, new bounds are computed from those.
    """
    saved = [
        (move(name, tensor), other.saved.outputs[name])
        for name, tensor in one.saved.outputs.items()
    ]
    same = all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in saved)
    for name, tensor in one.first.outputs.items():
        bound = move(name, getattr(one.gradients, f"{name}_bound"))
        yield RelatedResult(
            name,
            move(name, tensor),
            bound,
            other.first.outputs[name],
            bound if same else getattr(other.gradients, f"{name}_bound"),
            move(name, getattr(one.gradients, name)),
            other.problem.format,
        )


# Values.


def taken(tensor: Tensor, index: Tensor, dim: int = 2) -> Tensor:
    """Rows of a stored tensor at those positions, for any dtype: torch cannot index 8-bit
    floats."""
    return bits(tensor.contiguous()).index_select(dim, index).view(tensor.dtype)


def leading_bit(tensor: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Two tensors whose sum is exactly the given one: each element's leading bit, and the rest."""
    whole = tensor.double().numpy()
    _, exponent = np.frexp(whole)
    lead = np.copysign(np.where(whole == 0, 0.0, np.ldexp(0.5, exponent)), whole)
    return cast(lead, dtype), cast(whole - lead, dtype)
