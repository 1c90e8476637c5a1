"""Attention and its gradients of one tiny problem in fifty digits, with mpmath, to test
`references.attention`.

It only loops over nested lists, so that it can be read beside the formulas.  It shares no code with
`references.attention`, subtracts no maximum (mpmath's exponent has no bounds) and uses the
softmax's Jacobian directly, dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik), where `references.attention`
uses rowsum(dO O).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpmath import mp, mpf
from torch import Tensor

from references.masks import Mask
from references.score_mods import Extent, ScoreMod

DIGITS = 50

Lists = list[Any]  # nested, (batch, heads, seqlen, head_dim) of mpf unless said otherwise


@dataclass(frozen=True)
class Operands:
    """q, k, v and dout, the gradient of the output, in the shapes of `references.attention`; any
    float dtype, converted exactly."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask
    softmax_scale: float
    score_mod: ScoreMod | None = None


@dataclass(frozen=True)
class Result:
    """probabilities (batch, heads_q, seqlen_q, seqlen_kv), out, lse (batch, heads_q, seqlen_q) and
    gradients, lists of mpf."""

    probabilities: Lists
    out: Lists
    lse: Lists
    dq: Lists
    dk: Lists
    dv: Lists


def attention(operands: Operands) -> Result:
    """Forward and backward; an empty row has O = 0, LSE = -inf and zero gradients."""
    with mp.workdps(DIGITS):
        return _attention(operands)


def _attention(operands: Operands) -> Result:
    q, k, v, dout = (
        _exact(x.tolist()) for x in (operands.q, operands.k, operands.v, operands.dout)
    )
    batch, heads_q, seqlen_q, _ = operands.q.shape
    heads_kv, seqlen_kv = operands.k.shape[1:3]
    visible = operands.mask.dense(batch, heads_q, seqlen_q, seqlen_kv).tolist()
    p, out, lse = (_zeros(batch, heads_q, seqlen_q) for _ in range(3))
    dq, dk, dv = _zeros(*operands.q.shape), _zeros(*operands.k.shape), _zeros(*operands.v.shape)
    for b in range(batch):
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_kv) if visible[b][h][i][j]]
                row = _Row(
                    q[b][h][i],
                    [k[b][g][j] for j in seen],
                    [v[b][g][j] for j in seen],
                    dout[b][h][i],
                    [(b, h, i, j) for j in seen],
                )
                weights, out[b][h][i], lse[b][h][i] = _forward_row(row, operands)
                p[b][h][i] = _scatter(weights, seen, seqlen_kv)
                ds = _score_gradient(row, weights, operands)
                for j, weight, slope in zip(seen, weights, ds, strict=True):
                    _add(dq[b][h][i], slope, k[b][g][j])
                    _add(dk[b][g][j], slope, q[b][h][i])
                    _add(dv[b][g][j], weight, dout[b][h][i])
    return Result(p, out, lse, dq, dk, dv)


@dataclass(frozen=True)
class _Row:
    """One query with its gradient of the output, the keys and values that it sees, and where each
    pair is: (batch, head, query, key)."""

    q: Lists
    keys: Lists
    values: Lists
    dout: Lists
    at: list[tuple[int, int, int, int]]


def _forward_row(row: _Row, operands: Operands) -> tuple[Lists, Lists, mpf]:
    """Weights over the visible keys, O and LSE."""
    exps = [
        mp.exp(_modified(operands, at)(_scaled(row.q, key, operands)))
        for key, at in zip(row.keys, row.at, strict=True)
    ]
    total = mp.fsum(exps)
    weights = [e / total for e in exps]
    out = [
        mp.fsum(w * value[d] for w, value in zip(weights, row.values, strict=True))
        for d in range(len(row.dout))
    ]
    return weights, out, mp.log(total) if exps else -mp.inf


def _score_gradient(row: _Row, weights: Lists, operands: Operands) -> Lists:
    """The derivative of dout . O with respect to q . k, for every visible key: scale and score
    mod included."""
    dp = [_dot(row.dout, value) for value in row.values]
    mean = _dot(weights, dp)
    return [
        w
        * (x - mean)
        * mp.diff(_modified(operands, at), _scaled(row.q, key, operands))
        * mpf(operands.softmax_scale)
        for w, x, key, at in zip(weights, dp, row.keys, row.at, strict=True)
    ]


def _scaled(q: Lists, key: Lists, operands: Operands) -> mpf:
    return mpf(operands.softmax_scale) * _dot(q, key)


def _modified(operands: Operands, at: tuple[int, int, int, int]) -> Callable[[mpf], mpf]:
    """The score mod at one pair, as a function of the scaled score."""
    mod, (heads, seqlen_q) = operands.score_mod, operands.q.shape[1:3]
    extent = Extent(heads, seqlen_q, operands.k.shape[2])
    return lambda score: score if mod is None else mod.precise(mp, extent, score, at)


def _dot(x: Lists, y: Lists) -> mpf:
    return mp.fsum(a * b for a, b in zip(x, y, strict=True))


def _add(total: Lists, factor: mpf, x: Lists) -> None:
    for d, value in enumerate(x):
        total[d] += factor * value


def _scatter(weights: Lists, seen: list[int], length: int) -> Lists:
    row = _zeros(length)
    for j, weight in zip(seen, weights, strict=True):
        row[j] = weight
    return row


def _exact(values: Any) -> Any:
    return [_exact(x) for x in values] if isinstance(values, list) else mpf(values)


def _zeros(*shape: int) -> Lists:
    return [_zeros(*shape[1:]) if shape[1:] else mpf(0) for _ in range(shape[0])]
