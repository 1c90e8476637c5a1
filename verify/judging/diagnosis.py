"""Diagnosis: what a failing forward has computed instead, in words.

A finding says which element is wrong, and by how much.  Often the results are right for another
problem (`other_problems`), or the LSE is of another base: then the finding says that too.  A
diagnosis never changes a verdict: the results are out of the bounds of what was asked.

A small failing case can fit several explanations.  So the judge keeps, for each variant, those that
have fitted all failing cases so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.findings import Ruling
from verify.judging.other_problems import hypotheses
from verify.judging.trial import Trial
from verify.judging.truth import Truth, compute_truth
from verify.tolerance.forward import resolve

# Oracles that compare the case's own launch with its reference.
_JUDGES = ("bound", "integer_scores")
_MOST = 1 << 24  # multiply-adds of a case that is diagnosed: some twenty references are computed
_TRIES = 4  # failing cases of a variant that fit nothing, until no more are tried


@dataclass
class Diagnoses:
    """fitting: a variant's ref -> the keys of the explanations that fit its failing
    cases.
    missed: a variant's ref -> failing cases that none fits."""

    fitting: dict[str, frozenset[str]] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    def explained(self, trial: Trial, ruling: Ruling) -> Ruling:
        """The ruling; its finding says what else the results are right for, if that is known."""
        finding, p = ruling.finding, trial.problem
        if finding is None or finding.oracle not in _JUDGES or trial.entry != "forward":
            return ruling
        if p.quantisation.scaled or p.format.itemsize == 1:  # factors go with the heads and rows
            return ruling
        if trial.first.out is None or p.pairs * (p.head_dim + p.head_dim_v) > _MOST:
            return ruling
        said = self._said(trial)
        if not said:
            return ruling
        return replace(ruling, finding=replace(finding, message=f"{finding.message}; {said}"))

    def _said(self, trial: Trial) -> str:
        truth = trial.truth
        if _out_holds(trial, truth) and _lse_holds(trial, truth.lse, truth.lse_bound):
            return ""  # what is wrong is less than a bound
        overflow = _overflow(trial)
        if overflow:
            return overflow
        ref = trial.declaration.ref
        if self.missed.get(ref, 0) >= _TRIES:
            return _half(trial)
        known = self.fitting.get(ref)
        found = dict(_fitting(trial, known))
        if not found:
            if known is None:
                self.missed[ref] = self.missed.get(ref, 0) + 1
            return _half(trial)
        self.fitting[ref] = frozenset(found)
        return f"the results would be right for {', or for '.join(found.values())}"


def _fitting(trial: Trial, known: frozenset[str] | None) -> Iterator[tuple[str, str]]:
    """The explanations, out of the known ones or of all, that the results are within the bounds
    of: key and text."""
    for text, lse, stretch in _other_lse(trial):
        if known is None or text in known:
            bound = trial.truth.lse_bound * stretch
            if _out_holds(trial, trial.truth) and _lse_holds(trial, lse, bound):
                yield text, text
    for other in hypotheses(trial.problem, trial.expanded):
        if known is not None and other.key not in known:
            continue
        arithmetic = resolve(trial.declaration.numerics, trial.config, other.problem, trial.arch)
        truth = compute_truth(
            other.problem, other.values, [arithmetic.without_interval], trial.clock
        )
        if _out_holds(trial, truth) and _lse_holds(trial, truth.lse, truth.lse_bound):
            yield other.key, other.text


def _other_lse(trial: Trial) -> Iterator[tuple[str, Tensor, float]]:
    """What an LSE beside a right O can be: in words, the values, and by what its bound grows."""
    p, truth = trial.problem, trial.truth
    yield "an LSE in base 2 (the natural one is ln 2 times it)", truth.lse / math.log(2), 1.5
    if trial.declaration.contract.lse == "base2":
        yield "an LSE in base e", truth.lse * math.log(2), 1.0
    if p.score_mod is not None or not p.scale:
        return
    q, k, _ = (tensor.double() for tensor in trial.expanded)
    scores = q @ k.repeat_interleave(p.group, 1).mT * p.scale
    visible = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    top = scores.masked_fill(~visible, -torch.inf).amax(-1)
    total = truth.lse - top
    larger = max(1.0, 1 / abs(p.scale))
    yield "an LSE whose row maximum is not scaled", top / p.scale + total, larger
    yield (
        "an LSE of scores that are not scaled",
        (scores / p.scale).masked_fill(~visible, -torch.inf).logsumexp(-1),
        larger,
    )
    yield "an LSE without the row maximum", total, 1.0
    yield "the row maximum alone, in place of the LSE", top, 1.0
    yield "an LSE with the row sum's logarithm in base 2", top + total / math.log(2), 1.5


def _out_holds(trial: Trial, truth: Truth) -> bool:
    """Whether O is within these bounds, in rows that see a key; a bound that is infinite shows
    nothing."""
    live = ~truth.empty[..., None]
    got, output = trial.first.outputs["out"], trial.problem.format_out
    compared = compare(got, truth.out, truth.out_bound, output).among(live)
    known = bool((live & truth.out_bound.isfinite()).any())
    return known and compared.worst <= 1


def _lse_holds(trial: Trial, want: Tensor, bound: Tensor) -> bool:
    """Whether the LSE is within these bounds, or there is none."""
    if trial.first.lse is None:
        return True
    got = trial.natural_lse(trial.first.lse)
    live = want > -math.inf
    compared = compare(got, want.nan_to_num(neginf=0.0), bound, dtype_named("float32"))
    return compared.among(live).worst <= 1


def _half(trial: Trial) -> str:
    """What a right LSE says of a wrong O."""
    truth = trial.truth
    if trial.first.lse is None or _out_holds(trial, truth):
        return ""
    if not _lse_holds(trial, truth.lse, truth.lse_bound):
        return ""
    return "its LSE is right, so are scores and mask: look at P V, V and the rescaling of O"


def _overflow(trial: Trial) -> str:
    """Why O is not finite where it should be, if sums of products can have overflowed."""
    p, truth = trial.problem, trial.truth
    lost = ~trial.first.outputs["out"].double().isfinite() & truth.out.isfinite()
    rows = lost.any(-1) & ~truth.empty
    if not bool(rows.any()):
        return ""
    q, k, _ = (tensor.double().abs() for tensor in trial.expanded)
    largest = float((q @ k.repeat_interleave(p.group, 1).mT).amax(-1)[rows].max())
    if largest < p.format.overflow:
        return ""
    return (
        f"the products of a query and a key sum up to as much as {largest:.3g}, more than {p.dtype}"
        " holds: keep sums and scores in float32, or scale Q first"
    )
