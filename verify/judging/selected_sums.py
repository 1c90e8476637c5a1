"""dV where one key wins every row (the oracle `gather`): each key's row of dV is the sum of dO over
the rows that select it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import cast
from verify.judging.trial import Trial
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients


def selected_sums(trial: Trial, targets: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of dO by selected key, fp64, shaped like dv, and their allowed errors before
    the last rounding: 0 if the winners' P is certain to round to 1.

    The winner's P = exp(S - LSE^) is 1 except for the rounding of LSE^, which is known, and the
    error of the backward's exponent; if the backward computes its own softmax, P is exp(0) / 1.
    """
    p, declared = trial.problem, trial.declaration.gradients
    assert declared is not None
    a = resolve_gradients(declared, trial.config, p, trial.arch)
    z, error = (
        _exponents(trial, a, targets, live)
        if not a.own
        else torch.zeros(2, *targets.shape, dtype=torch.float64)
    )
    low, high = (_cast_probability(torch.exp(z + side * error), a.probability) for side in (-1, 1))
    off = torch.maximum((low - 1).abs(), (high - 1).abs()).masked_fill(~live, 0.0)[..., None]
    dout = trial.dout.double().masked_fill(~live[..., None], 0.0)
    # Per key and query head: sums, magnitudes, and errors of the weights; then sums over the group.
    sums, sizes, offs = (
        _scatter(x, targets, live, p.seqlen_kv) for x in (dout, dout.abs(), dout.abs() * off)
    )
    cast_off = (
        a.output.unit_roundoff * (sums.abs() + offs) * (sums.abs() + offs > 2.0**a.output.precision)
        if a.cast
        else 0.0
    )
    sums, sizes, offs = (
        x.view(p.batch, p.heads_kv, p.group, *x.shape[2:]).sum(2)
        for x in (sums, sizes, offs + cast_off)
    )
    rounded = a.weights.kappa(p.seqlen_q * p.group) + relative(
        a.blocks_m * p.group + a.gradient_roundings, U
    )
    return sums, offs + (offs > 0) * (1 + rounded) * rounded * (sizes + offs)


def _exponents(
    trial: Trial, a: GradientArithmetic, targets: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Return S - LSE^ of each row's winner, and the bound of the backward's error in it; Q K^T of
    the codes is exact."""
    p = trial.problem
    index = targets.clamp(min=0)[..., None].expand(*targets.shape, p.head_dim)
    q, k, _ = (x.double() for x in trial.expanded)
    keys = k.repeat_interleave(p.group, 1)
    score = (
        (q * keys.gather(2, index)).sum(-1) * p.scale if p.seqlen_kv else q.new_zeros(targets.shape)
    )
    lse = torch.where(live, trial.start[1], 0.0)
    z = torch.where(live, score - lse, 0.0)
    scaled = relative(a.scale_roundings + 1, U) * score.abs()
    reach = z.abs() + scaled
    error = (
        scaled
        + relative(4, U) / 4 * (reach + 2 * torch.maximum(reach, lse.abs()))
        - math.log1p(-a.exp)
    )
    return z, error


def _cast_probability(values: Tensor, probability: DType) -> Tensor:
    """Round P as it enters its product; fp32 is not rounded."""
    return values if probability.precision >= 24 else cast(values.numpy(), probability).double()


def _scatter(rows: Tensor, targets: Tensor, live: Tensor, seqlen_kv: int) -> Tensor:
    """Sum the rows by the key that they select, (batch, heads_q, seqlen_kv, dim)."""
    found = rows.new_zeros(*rows.shape[:2], seqlen_kv, rows.shape[-1])
    index = targets.clamp(min=0)[..., None].expand(rows.shape)
    return (
        found.scatter_add_(2, index, rows.masked_fill(~live[..., None], 0.0))
        if seqlen_kv
        else found
    )
