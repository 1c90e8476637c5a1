"""Probability: rows of two keys show the format of P, the terms of the row sum, and the
exponential.

The first key's score is 0 and the other's -x_i, so P is 1 and p_i = exp(-x_i) before any division,
and LSE = log1p(p_i). Column i of V is -c_i and 1 and serves row i; c_i is p_i in few bits: O (1 +
p_i) = P_i - c_i P_0 is small, and its rounding does not hide that of P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import EXP
from verify.arithmetic.rounding import to_bits, to_format
from verify.judging.comparison import compare
from verify.judging.measuring import result
from verify.judging.trial import Trial
from verify.oracles.numerics.hypotheses import (
    FLOAT32,
    Claim,
    bounded,
    exact_probabilities,
    excess,
    run_if_supported,
)

_ROWS = 64
_LN2 = math.log(2)
_FORMATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
BEFORE = "of P before rounding"
NONE = "no format in particular"
_MOST = 0.9  # share of rows to explain; a P near the middle of two numbers can round either way


@dataclass(frozen=True)
class Rows:
    """The probe, the rows that it uses, and p and c of each."""

    probe: Trial
    rows: Tensor
    p: Tensor
    c: Tensor

    @property
    def got(self) -> Tensor:
        """Return O of row i in column i, fp64."""
        return result(self.probe.first)[0, 0, self.rows, self.rows].double()


@dataclass(frozen=True)
class Rounding:
    """One way to round P: its format, whether it is divided before, its scale, and whether the row
    sum adds rounded P."""

    format: str
    normalised: bool
    scale: float = 1.0
    rounded_sum: bool = False

    def out(self, p: Tensor, c: Tensor) -> Tensor:
        """Return O of the probe's rows."""
        rounded, one = to_format(self.format), torch.ones_like(p)
        mass = one + p
        if self.normalised:
            return rounded(p / mass) - c * rounded(one / mass)
        top, weight = (rounded(x * self.scale) / self.scale for x in (one, p))
        return (weight - c * top) / (top + weight if self.rounded_sum else mass)


def rows_of(trial: Trial) -> Rows | None:
    """Run the probe; return None if the support does not have its problem."""
    p = trial.problem
    if p.head_dim < 8 or p.scale <= 0:
        return None
    count = min(_ROWS, p.head_dim_v)
    steps = torch.arange(_ROWS)
    q, k = torch.zeros(_ROWS, p.head_dim), torch.zeros(_ROWS, p.head_dim)
    q[:, 0], k[1, 0] = (steps // 8).float(), -2.0
    q[:, 1], k[1, 1] = (steps % 8).float(), -0.25
    q[:, 2], k[2:, 2] = 32.0, -64.0  # keys without weight
    rows = torch.arange(1, count)
    weights = torch.exp(-p.scale * (2.0 * (steps // 8) + 0.25 * (steps % 8)).double())[rows]
    coarse = to_bits(min(p.format.precision, 8))(weights)
    v = torch.zeros(_ROWS, p.head_dim_v, dtype=torch.float64)
    v[0, rows], v[1, rows] = -coarse, 1.0
    problem = p.but(batch=1, heads_q=p.group, heads_kv=1, seqlen_q=_ROWS, seqlen_kv=_ROWS)
    probe = run_if_supported(trial, "probabilities", problem, q, k, v)
    return None if probe is None else Rows(probe, rows, weights, coarse)


def probability(trial: Trial, found: Rows, exponential: float) -> Claim:
    """Test the format of P, by the share of rows that each format explains up to all other errors.

    exponential: its measured relative error, which can exceed the declared one.
    """
    declared = _declared(trial)
    others = exact_probabilities(found.probe).out_bound[0, 0, found.rows, found.rows]
    error = max(exponential, _exp_error(trial, found))
    shares = {way: _share(found, way, others, error) for way in _ways()}
    best = max(shares, key=lambda way: (round(shares[way], 2), dtype_named(way.format).precision))
    word = best.format if shares[best] >= _MOST else NONE
    own = max(share for way, share in shares.items() if way.format == declared)
    ratio = excess(found.probe, _read(found))
    coarser = word != declared and (
        word not in _FORMATS or dtype_named(word).precision < dtype_named(declared).precision
    )
    # If a format explains every row and the declared one few, this is as good a proof as a bound.
    if coarser and word in _FORMATS and own < 1 - _MOST:
        ratio = max(ratio, math.inf)
    evidence = f"{word} explains {shares[best]:.0%} of {len(found.rows)} rows, {declared} {own:.0%}"
    return Claim("P", word, declared, ratio, coarser, evidence)


def _ways() -> Iterator[Rounding]:
    for name in _FORMATS:
        for normalised in (False, True):
            yield Rounding(name, normalised)
        if dtype_named(name).itemsize == 1:
            yield Rounding(name, False, 256.0)


def _share(found: Rows, way: Rounding, others: Tensor, error: float) -> float:
    """Return the share of rows that one way of rounding explains; an error of the exponential can
    move p across the middle of two numbers.

    `others` contains the rounding of the right O; the rounding of this way's O, which can be
    larger, is added.
    """
    last, explained = (
        found.probe.problem.format_out.unit_roundoff,
        torch.zeros_like(found.got, dtype=torch.bool),
    )
    for p in (found.p * (1 - error), found.p, found.p * (1 + error)):
        out = way.out(p, found.c)
        explained |= (found.got - out).abs() <= others + last * out.abs()
    return float(explained.double().mean())


def _declared(trial: Trial) -> str:
    """Return the declared format of P."""
    declared = trial.declaration.numerics.output.probability
    return trial.problem.dtype if declared == "input" else declared


def _exp_error(trial: Trial, found: Rows) -> float:
    """Return the relative error of the declared exponential on the probe's arguments."""
    return EXP[trial.declaration.numerics.softmax.exp].error_at(-math.log2(float(found.p.min())))


def row_sum(trial: Trial, found: Rows) -> Claim | None:
    """Test whether the LSE's row sum adds P as rounded for the product; None if P is not rounded or
    there is no LSE."""
    lse, numerics = found.probe.first.lse, trial.declaration.numerics
    if lse is None or _declared(trial) == "float32":
        return None
    natural, exact = found.probe.natural_lse(lse)[0, 0, found.rows], torch.log1p(found.p)
    close = bounded(found.probe, row_sum="unrounded").lse_bound[0, 0, found.rows]
    possible = {
        f"of P rounded to {name}": torch.log1p(to_format(name)(found.p)) for name in _FORMATS[1:]
    }
    fits = {
        name: float(((natural - value).abs() <= close).double().mean())
        for name, value in possible.items()
    }
    best = max(fits, key=fits.__getitem__)
    own = float(((natural - exact).abs() <= close).double().mean())
    word = best if fits[best] >= _MOST and fits[best] > own else BEFORE
    declared = (
        BEFORE
        if numerics.softmax.row_sum.of == "unrounded"
        else f"of P rounded to {_declared(trial)}"
    )
    evidence = (
        f"LSE is as near as it can be to log1p(p) in {own:.0%} of the rows, to that {best} in"
        f" {fits[best]:.0%}"
    )
    ratio = compare(natural, exact, found.probe.truth.lse_bound[0, 0, found.rows], FLOAT32).worst
    return Claim("row sum", word, declared, ratio, word not in (BEFORE, declared), evidence)


def exponential(trial: Trial, found: Rows) -> tuple[Claim, float] | None:
    """Test the exponential by the row sum in the LSE, or by p in O if P stays fp32; None if P's
    rounding hides it.  Also return the measured error.
    """
    lse, numerics = found.probe.first.lse, trial.declaration.numerics
    truth, at = found.probe.truth, (0, 0, found.rows)
    if lse is not None:
        natural, exact = found.probe.natural_lse(lse)[at], torch.log1p(found.p)
        if (
            min(
                (1.0, _LN2, 1 / _LN2),
                key=lambda factor: float((natural * factor - exact).abs().sum()),
            )
            != 1.0
        ):
            return None  # an LSE of another base than declared shows nothing of the exponential
        error = (natural - exact).abs()
        ratio, what = compare(natural, truth.lse[at], truth.lse_bound[at], FLOAT32).worst, "row sum"
    elif _declared(trial) == "float32":
        error = ((found.got - truth.out[*at, found.rows]) * (1 + found.p) / found.p).abs()
        ratio, what = excess(found.probe, _read(found)), "P"
    else:
        return None
    largest, promised = float(error.nan_to_num(nan=math.inf).max()), _exp_error(trial, found)
    bits = min(21, math.floor(-math.log2(max(largest, 2.0**-30)))) if largest < 1 else 0
    evidence = (
        f"the {what} has a relative error of {largest:.3g}, {numerics.softmax.exp} of"
        f" {promised:.3g} at most"
    )
    return (
        Claim(
            "exponential",
            f"within 2^-{bits}",
            numerics.softmax.exp,
            ratio,
            largest > promised,
            evidence,
        ),
        largest,
    )


def _read(found: Rows) -> Tensor:
    """Return the elements of O that the probe reads, as booleans."""
    where = torch.zeros(found.probe.problem.shape_out, dtype=torch.bool)
    where[0, 0, found.rows, found.rows] = True
    return where
