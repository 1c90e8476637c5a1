"""Accumulators of Q K^T and P V: sums of large terms that cancel and of small terms that only a
wide accumulator keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from verify.arithmetic.rounding import to_format
from verify.judging.measuring import result
from verify.judging.trial import Trial
from verify.oracles.numerics.hypotheses import (
    NARROW,
    Claim,
    exact_probabilities,
    excess,
    logit_difference,
    nearest,
    run_if_supported,
)
from verify.tolerance.resolution import block_size

# log2 of large / small: fp16 keeps the first and bfloat16 loses it, fp16 loses the second, 13
# fraction bits the third; the last one, with large products of 2^16, overflows fp16.
_SCORE_RATIOS = (10, 12, 14, 18)
_VALUE_RATIOS = (10, 13, 16, 17)
_LONE_RATIO = 14
_GROUPS = (1, 4, 8, 16, 32, 64)  # products that are added before the accumulator is rounded
_PROMOTIONS = (32, 64, 128)
_OF_SCORES, _OF_VALUES = "accumulator of Q K^T", "accumulator of P V"
_KEYS = 256
_PARTS = 8  # of a promoted sum, at least: fewer differ too little from a sum that is not promoted
_ROWS = 16


def scores(trial: Trial) -> Claim | None:
    """Test the accumulator of Q K^T: S of one key is a sum of small products between +large and
    -large, S of another key is 0.  Each sequence is one case."""
    p = trial.problem
    if p.head_dim < 32 or not p.scale:
        return None
    count = p.head_dim - 3  # two large products; the last element keeps the other keys away
    # log2 of the product that makes the difference of the logits about 2.
    power = round(math.log2(2 / (abs(p.scale) * count)))
    cases = [(ratio, ends) for ratio in _SCORE_RATIOS for ends in _ends(p.head_dim - 1)]
    q, k = torch.full((len(cases), p.head_dim), 0.5), torch.zeros(len(cases), 2, p.head_dim)
    for case, (ratio, (first, last)) in enumerate(cases):
        large = power + ratio
        k[case, 1, :-1] = math.ldexp(1.0, power + 1)
        q[case, [first, last]] = math.ldexp(1.0, large - large // 2)
        k[case, :, first], k[case, :, last] = (
            math.ldexp(1.0, large // 2),
            -math.ldexp(1.0, large // 2),
        )
    q[:, -1] = 8.0
    rows = max(_ROWS, trial.declaration.support.min_seqlen)
    keys = torch.zeros(len(cases), rows, p.head_dim)
    keys[:, :, -1] = -64.0
    keys[:, :2] = k
    sign = 1.0 if p.scale > 0 else -1.0
    values = torch.zeros(rows, p.head_dim_v)
    values[0, 0] = values[1, 1] = 1.0
    problem = p.but(batch=len(cases), heads_q=p.group, heads_kv=1, seqlen_q=rows, seqlen_kv=rows)
    probe = run_if_supported(
        trial, "accumulator of scores", problem, sign * q[:, None, None], keys[:, None], values
    )
    if probe is None:
        return None
    products = (q.double()[:, None] * k.double())[..., :-1]
    got = logit_difference(probe)[:, 0, -1]
    possible = {
        name: (sums[:, 1] - sums[:, 0]) * abs(p.scale)
        for name, sums in _sums(products, promotions=() if p.format.itemsize > 1 else _PROMOTIONS)
    }
    word = nearest(got, possible, 4.0)
    where = torch.zeros(problem.shape_out, dtype=torch.bool)
    where[:, :, -1, :2] = True
    evidence = (
        f"logit differences of {float(possible['float32'][0]):.3g} come out as {_listed(got)}"
    )
    return _claim(trial, _OF_SCORES, word, excess(probe, where), evidence)


def values(trial: Trial) -> Claim | None:
    """Test the accumulator of P V: scores are equal, so P is 1 (or a power of two) in any format; V
    is +large, small ..., -large.  Each column is one case."""
    p = trial.problem
    eight = p.format.itemsize == 1
    largest = 8 if eight else 14
    keys = max(_KEYS, _PARTS * _every(trial)) if eight else _KEYS
    rows = _ROWS if trial.declaration.support.cross_lengths else keys
    problem = p.but(batch=1, heads_q=p.group, heads_kv=1, seqlen_q=rows, seqlen_kv=keys)
    # Sums without cancellation lose more than 13 bits can lose in one part of a promoted sum.
    cases: list[tuple[int, int, int | None]] = [
        (_LONE_RATIO, 0, None),
        (_LONE_RATIO, keys - 1, None),
    ]
    cases = [*cases, *((ratio, *ends) for ratio in _VALUE_RATIOS for ends in _ends(keys))][
        : p.head_dim_v
    ]
    v = torch.zeros(keys, p.head_dim_v)
    for case, (ratio, first, last) in enumerate(cases):
        v[:, case] = math.ldexp(1.0, largest - ratio)
        v[first, case] = math.ldexp(1.0, largest)
        if last is not None:
            v[last, case] = -math.ldexp(1.0, largest)
    zero = torch.zeros(1)
    probe = run_if_supported(trial, "accumulator of values", problem, zero, zero, v)
    if probe is None:
        return None
    exact = (v[:, : len(cases)].double().sum(0)) / keys
    got = result(probe.first)[0, 0, -1, : len(cases)].double() / exact
    products = v.double().T[: len(cases)]
    possible = {
        name: sums / keys / exact for name, sums in _sums(products, _PROMOTIONS if eight else ())
    }
    word = nearest(got, possible, 2.0)
    where = torch.zeros(problem.shape_out, dtype=torch.bool)
    where[..., -1, : len(cases)] = True
    evidence = f"sums come out as {_listed(got)} of what they are"
    # P is 1, unless more than the maximum is subtracted.
    truth = (
        None if trial.declaration.numerics.softmax.maximum.excess else exact_probabilities(probe)
    )
    return _claim(trial, _OF_VALUES, word, excess(probe, where, truth), evidence)


def _claim(trial: Trial, name: str, word: str, ratio: float, evidence: str) -> Claim:
    numerics = trial.declaration.numerics
    eight = trial.problem.format.itemsize == 1
    declared = (
        numerics.products.score_accumulator or numerics.products.accumulator
        if name == _OF_SCORES
        else numerics.products.accumulator
    )
    every = _every(trial, of_values=name == _OF_VALUES)
    if eight and every:
        declared += f", promoted every {every}"
    elif eight:
        declared += ", of the unit"
    return Claim(name, word, declared, ratio, word != "float32", evidence)


def _every(trial: Trial, *, of_values: bool = True) -> int:
    """The declared products between promotions of P V, or of Q K^T; 0: none."""
    numerics = trial.declaration.numerics
    keys = block_size(numerics.softmax.block_n, trial.config.block_n) or trial.problem.seqlen_kv
    return numerics.products.promotions(keys)[of_values]


def _ends(length: int) -> tuple[tuple[int, int], ...]:
    """Return positions of the two large terms: a chain in any order has most small terms between
    the terms of some pair."""
    return (0, length - 1), (length - 1, 0), (length // 2, length - 1)


def _sums(products: Tensor, promotions: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield names of accumulators and their sums along the last dimension, the likeliest first."""
    yield "float32", products.sum(-1)
    for every in promotions:
        parts = [_truncated(part) for part in torch.split(products, every, -1)]
        yield f"13 fraction bits, promoted every {every}", torch.stack(parts).sum(0)
    if promotions:
        yield "13 fraction bits, never promoted", _truncated(products)
    for name in NARROW:
        for group in _GROUPS:
            yield (
                f"{name}, rounded every {group} products" if group > 1 else name,
                _chain(products, name, group),
            )


def _chain(products: Tensor, name: str, group: int) -> Tensor:
    rounded, total = to_format(name), torch.zeros_like(products[..., 0])
    for part in torch.split(products, group, -1):
        total = rounded(total + part.sum(-1))
    return total


def _truncated(products: Tensor) -> Tensor:
    """Sum in one chain, as a unit that adds 32 products at a time, aligned to the largest term with
    13 fraction bits, rounded towards zero."""
    total = torch.zeros_like(products[..., :1])
    for part in torch.split(products, 32, -1):
        terms = torch.cat([total, part], -1)
        quantum = torch.exp2(
            torch.floor(torch.log2(terms.abs().amax(-1, keepdim=True).clamp(min=1e-300))) - 13
        )
        total = ((terms / quantum).trunc() * quantum).sum(-1, keepdim=True)
    return total[..., 0]


def _listed(values_: Tensor) -> str:
    return ", ".join(f"{float(value):.3g}" for value in values_)
